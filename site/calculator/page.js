// The calculator's page: what is typed, and the results of formulas.js as bars and tables.

const whole = (box, label, most) => ({ box, label, limits: [1, most], isWhole: true });
const measured = (box, label, unit, limits) => ({ box, label, units: [unit], limits });
/** What can be typed, see fieldsOf(). */
const TYPED = {
  layers: whole("of-layers", "layers", 1e4),
  width: whole("of-layers", "width h", 1e6),
  heads: whole("of-layers", "heads a", 1e4),
  vocabulary: whole("of-layers", "vocabulary", 1e7),
  context: whole("of-layers", "positions", 1e7),
  experts: whole("of-layers", "experts in a layer E", 1e4),
  activeExperts: whole("of-layers", "experts of a token k", 1e4),
  parameters: measured("of-parameters", "parameters", ["million", 1e6], [1e3, 1e15]),
  batch: whole("of-batch", "texts in a microbatch b", 1e6),
  sequence: whole("of-batch", "tokens in a text s", 1e7),
  microbatches: whole("of-batch", "microbatches m", 1e5),
  dataRanks: whole("of-ranks", "data parallel n", 1e6),
  pipelineRanks: whole("of-ranks", "pipeline p", 4096),
  tensorRanks: whole("of-ranks", "tensor t", 4096),
  contextRanks: whole("of-ranks", "context c", 4096),
  expertRanks: whole("of-ranks", "expert e", 4096),
  capacity: measured("of-machine", "memory of a rank", ["GB", 1e9], [1e6, 1e14]),
  flops: measured("of-machine", "a rank computes", ["TFLOP/s", 1e12], [1e9, 1e17]),
  alpha: measured("of-machine", "latency α", ["µs", 1e-6], [0, 1]),
  rate: measured("of-machine", "rate 1/β", ["Gbit/s", 1], [1e-3, 1e5]),
  innerRate: measured("of-machine", "rate within a machine", ["Gbit/s", 1], [1e-3, 1e5]),
  share: measured("of-less", "top-k sends", ["%", 0.01], [1e-6, 1]),
  columns: whole("of-less", "PowerSGD's columns r", 1e4),
  syncEvery: whole("of-less", "steps alone H", 1e6),
  machineRanks: whole("of-less", "ranks of a machine g", 1e4),
};
const CHOICES = {
  model: [["layers", "layers and width"], ["parameters", "its number of parameters"]],
  precision: Object.entries(PRECISIONS).map(([name, { title }]) => [name, title]),
  optimizer: Object.entries(OPTIMIZERS).map(([name, [title]]) => [name, title]),
  recompute: Object.entries(RECOMPUTED).map(([name, title]) => [name, title]),
  stage: [[0, "0: no ZeRO"], [1, "1"], [2, "2"], [3, "3"]],
  schedule: Object.entries(SCHEDULES).map(([name, { title }]) => [name, title]),
};
const OPTIONS = [["keepsAttention", "keep attention's matrices (off: fused attention keeps none)"], ["sequenceParallel", "sequence parallel"]];
/** Models of the workbook and of papers, with their layers, width, heads, vocabulary and positions. */
const PRESETS = {
  "the workbook's 13m": [4, 512, 8, 256, 256],
  "GPT-2": [12, 768, 12, 50257, 1024],
  "GPT-2 XL": [48, 1600, 25, 50257, 1024],
  "GPT-3 7B": [32, 4096, 32, 50257, 2048],
  "GPT-3": [96, 12288, 96, 50257, 2048],
};
/** Machines: data parallel ranks, pipeline ranks, bytes of memory, operations and gigabits a second, latency. */
const MACHINES = {
  "8 ranks of 80 GB in one box": [8, 1, 80e9, 150e12, 2000, 10e-6],
  "32 ranks of 40 GB on a network": [8, 4, 40e9, 100e12, 100, 20e-6],
};
const set = {
  model: "layers", layers: 48, width: 1600, heads: 25, vocabulary: 50257, context: 1024, parameters: 1.5e9,
  precision: "bf16", optimizer: "adamw", batch: 4, sequence: 1024, microbatches: 8, recompute: "nothing",
  keepsAttention: false, sequenceParallel: false, experts: 1, activeExperts: 1, dataRanks: 8, pipelineRanks: 4, tensorRanks: 1,
  contextRanks: 1, expertRanks: 1, stage: 1, schedule: "1f1b",
  flops: 100e12, alpha: 20e-6, rate: 100, innerRate: 2000, capacity: 40e9,
  share: 0.01, columns: 4, syncEvery: 32, machineRanks: 4,
};

const fields = fieldsOf(TYPED, set);

function offerAll() {
  for (const [name, options] of Object.entries(CHOICES)) {
    set[name] = options.map(([value]) => value).find((value) => String(value) === linked[name]) ?? set[name];
    offer(name, "radio", options, (value) => value === set[name]);
  }
  for (const [name] of OPTIONS) if (linked[name]) set[name] = linked[name] === "true";
  offer("options", "checkbox", OPTIONS, (name) => set[name]);
  for (const [id, examples] of [["preset", PRESETS], ["machine", MACHINES]]) {
    offer(id, "radio", Object.keys(examples).map((name) => [name, name]), () => false);
  }
}

$("settings").addEventListener("input", ({ target }) => {
  const { name, value, checked } = target;
  if (name === "preset") {
    [set.layers, set.width, set.heads, set.vocabulary, set.context] = PRESETS[value];
    [set.model, set.sequence] = ["layers", set.context];
    showSet();
  } else if (name === "machine") {
    [set.dataRanks, set.pipelineRanks, set.capacity, set.flops, set.rate, set.alpha] = MACHINES[value];
    showSet();
  } else if (name === "options") set[value] = checked;
  else if (CHOICES[name]) set[name] = name === "stage" ? Number(value) : value;
  else fields.read();
  draw();
});
/** Show all that is set in the form, after something else than the form has changed it. */
function showSet() {
  fields.show();
  fields.read();
  const choices = [...Object.keys(CHOICES).map((name) => [name, String(set[name])])];
  for (const [name, value] of choices) document.querySelector(`[name=${name}][value="${value}"]`).checked = true;
  for (const [name] of OPTIONS) document.querySelector(`[name=options][value=${name}]`).checked = set[name];
}

function start() {
  if (linked.embed === "less") for (const id of ["memory", "less"]) $(id).classList.toggle("embed");
  offerAll();
  fields.put();
  draw();
}

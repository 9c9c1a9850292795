// The calculator's page: what is typed, and the results of formulas.js as bars and tables.

/** What can be typed: a label, the unit and its size, the limits in that unit, and whether it is a whole number. */
const TYPED = {
  layers: ["of-layers", "layers", "", 1, [1, 1e4], true],
  width: ["of-layers", "width h", "", 1, [1, 1e6], true],
  heads: ["of-layers", "heads a", "", 1, [1, 1e4], true],
  vocabulary: ["of-layers", "vocabulary", "", 1, [1, 1e7], true],
  context: ["of-layers", "positions", "", 1, [1, 1e7], true],
  parameters: ["of-parameters", "parameters", "million", 1e6, [1e-3, 1e9], false],
  batch: ["of-batch", "texts in a microbatch b", "", 1, [1, 1e6], true],
  sequence: ["of-batch", "tokens in a text s", "", 1, [1, 1e7], true],
  microbatches: ["of-batch", "microbatches m", "", 1, [1, 1e5], true],
  dataRanks: ["of-ranks", "data parallel n", "", 1, [1, 1e6], true],
  pipelineRanks: ["of-ranks", "pipeline p", "", 1, [1, 4096], true],
  flops: ["of-machine", "a rank computes", "TFLOP/s", 1e12, [1e-3, 1e5], false],
  alpha: ["of-machine", "latency α", "µs", 1e-6, [0, 1e6], false],
  rate: ["of-machine", "rate 1/β", "Gbit/s", 1, [1e-3, 1e5], false],
  capacity: ["of-machine", "memory of a rank", "GB", 1e9, [1e-3, 1e5], false],
};
const CHOICES = {
  model: [["layers", "layers and width"], ["parameters", "its number of parameters"]],
  precision: Object.entries(PRECISIONS).map(([name, { title }]) => [name, title]),
  optimizer: Object.entries(OPTIMIZERS).map(([name, [title]]) => [name, title]),
  stage: [[0, "0: no ZeRO"], [1, "1"], [2, "2"], [3, "3"]],
  schedule: Object.entries(SCHEDULES).map(([name, { title }]) => [name, title]),
};
const OPTIONS = [["recompute", "recompute"], ["keepsAttention", "keep attention's matrices"]];
/** Models of the workbook and of papers, with their layers, width, heads, vocabulary and positions. */
const PRESETS = {
  "the workbook's 13m": [4, 512, 8, 256, 256],
  "GPT-2": [12, 768, 12, 50257, 1024],
  "GPT-2 XL": [48, 1600, 25, 50257, 1024],
  "GPT-3": [96, 12288, 96, 50257, 2048],
};
const set = {
  model: "layers", layers: 48, width: 1600, heads: 25, vocabulary: 50257, context: 1024, parameters: 1.5e9,
  precision: "bf16", optimizer: "adamw", batch: 4, sequence: 1024, microbatches: 8, recompute: false,
  keepsAttention: false, dataRanks: 8, pipelineRanks: 4, stage: 1, schedule: "1f1b",
  flops: 100e12, alpha: 20e-6, rate: 100, capacity: 40e9,
};

/** Take over what a link names, where it is possible. */
function readLink() {
  const given = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  for (const [name, [, , , unit, [least, most], isWhole]] of Object.entries(TYPED)) {
    const value = typed(given[name], [least * unit, most * unit], set[name]);
    set[name] = isWhole ? Math.round(value) : value;
  }
  for (const [name, options] of Object.entries(CHOICES)) {
    set[name] = options.map(([value]) => value).find((value) => String(value) === given[name]) ?? set[name];
  }
  for (const [name] of OPTIONS) if (given[name]) set[name] = given[name] === "true";
}

function offerAll() {
  for (const [name, [box, label, unit]] of Object.entries(TYPED)) {
    $(box).insertAdjacentHTML("beforeend", `<label for="${name}">${label}<span><input id="${name}" name="${name}"`
      + ` inputmode="decimal" autocomplete="off" size="7"> ${unit}</span></label>`);
  }
  for (const [name, options] of Object.entries(CHOICES)) offer(name, "radio", options, (value) => value === set[name]);
  offer("options", "checkbox", OPTIONS, (name) => set[name]);
  offer("preset", "radio", Object.keys(PRESETS).map((name) => [name, name]), () => false);
  showTyped();
}

function showTyped() {
  for (const [name, [, , , unit]] of Object.entries(TYPED)) $(name).value = Number((set[name] / unit).toPrecision(12));
}

/** Take over what is typed. What is no number within the limits is named, and is not used. */
function readTyped() {
  const complaints = [];
  for (const [name, [, label, unitName, unit, limits, isWhole]] of Object.entries(TYPED)) {
    const value = typed($(name).value, limits, NaN);
    const isWrong = Number.isNaN(value) || (isWhole && !Number.isInteger(value));
    $(name).setAttribute("aria-invalid", isWrong);
    if (!isWrong) set[name] = value * unit;
    else if (!$(name).closest("[hidden]")) {
      complaints.push(`${label}: give ${isWhole ? "a whole number" : "a number"} from ${limits[0]} to ${limits[1]}`
        + `${unitName && ` ${unitName}`}.`);
    }
  }
  $("complaint").textContent = complaints.join(" ");
}

$("settings").addEventListener("input", ({ target }) => {
  const { name, value, checked } = target;
  if (name === "preset") {
    [set.layers, set.width, set.heads, set.vocabulary, set.context] = PRESETS[value];
    [set.model, set.sequence] = ["layers", set.context];
    document.querySelector("[name=model][value=layers]").checked = true;
    showTyped();
    readTyped();
  } else if (name === "options") set[value] = checked;
  else if (CHOICES[name]) set[name] = name === "stage" ? Number(value) : value;
  else readTyped();
  draw();
});
$("settings").addEventListener("submit", (event) => event.preventDefault());
addEventListener("hashchange", () => location.reload());

function start() {
  readLink();
  offerAll();
  draw();
}

// What pages to play with have in common: numbers in words, choices, numbers to type, tables.

const $ = (id) => document.getElementById(id);
const text = (value) => String(value).replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);
const number = (value) => String(Number(value.toPrecision(4)));
const log2Up = (n) => Math.ceil(Math.log2(n));
const percent = (share) => `${(100 * share).toFixed(1)} %`;

function inUnit(value, units) {
  const [name, unit] = units.find(([, each]) => Math.abs(value) >= each * 0.99995) ?? units.at(-1);
  return `${Number((value / unit).toPrecision(4))} ${name}`;
}
const seconds = (value) => (value ? inUnit(value, [["s", 1], ["ms", 1e-3], ["µs", 1e-6], ["ns", 1e-9]]) : "0 s");
const bytes = (value) => inUnit(value, [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3], ["bytes", 1]]);

/** What the address names after its #, so that a link opens what its author saw. */
const linked = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
const link = (settings) => history.replaceState(null, "", `#${new URLSearchParams(settings)}`);
addEventListener("hashchange", () => location.reload());
$("settings").addEventListener("submit", (event) => event.preventDefault());

/** The buttons under "What to try" open the page with the settings in their value, and say what can be seen. */
function offerTries() {
  const buttons = [...$("tries").querySelectorAll("button")];
  const show = (tried) => {
    buttons.forEach((button, i) => button.setAttribute("aria-pressed", i === tried));
    $("tried").textContent = buttons[tried]?.dataset.words ?? "";
  };
  show(Number(linked.try ?? -1));
  const embed = linked.embed ? `&embed=${linked.embed}` : "";
  buttons.forEach((button, i) => button.addEventListener("click", () => {
    location.hash = `${button.value}&try=${i}${embed}`;
  }));
  $("settings").addEventListener("input", () => show(-1));
}

/** In another page there is only room for what moves, and that page has to know its height. */
function fitIn() {
  document.documentElement.classList.add("embedded");
  const tell = () => parent.postMessage({ height: document.body.scrollHeight }, "*");
  new ResizeObserver(tell).observe(document.body);
}
if (linked.embed) fitIn();

/** Fill a fieldset with radio buttons or checkboxes, [value, label] each. */
function offer(id, type, options, isChosen) {
  const box = $(id);
  box.hidden = options.length < 2;
  box.querySelector("span")?.remove();
  const span = document.createElement("span");
  span.innerHTML = options.map(([value, label]) =>
    `<label><input type="${type}" name="${id}" value="${text(value)}" ${isChosen(value) ? "checked" : ""}>`
    + `${text(label)}</label>`).join("");
  box.append(span);
}

/** The number that is given, or `otherwise` where there is none within the limits. */
function typed(given, [least, most], otherwise) {
  const value = given === undefined || String(given).trim() === "" ? NaN : Number(given);
  return value >= least && value <= most ? value : otherwise;
}

/**
 * Numbers to type. `described` has for each name: {box, label, units, limits, isWhole, say}. The box is the element
 * that gets the field; of units, [name, size] each, one is chosen if there are several; limits are in the unit of
 * size 1, as are the `values` that fields show and change; `say` puts a limit in words.
 */
function fieldsOf(described, values) {
  const entries = Object.entries(described).map(([name, field]) => [name, { units: [["", 1]], ...field }]);
  const sizeOf = (name, { units }) => (units.length > 1 ? Number($(`${name}-unit`).value) : units[0][1]);
  const unitOf = (name, { label, units }) => (units.length === 1 ? units[0][0]
    : `<select id="${name}-unit" name="${name}-unit" aria-label="Unit of ${label}">`
      + `${units.map(([unit, size]) => `<option value="${size}">${unit}</option>`).join("")}</select>`);

  for (const [name, { limits, isWhole }] of entries) {
    const value = typed(linked[name], limits, values[name]);
    values[name] = isWhole ? Math.round(value) : value;
  }

  function put() {
    for (const [name, field] of entries) {
      $(field.box).insertAdjacentHTML("beforeend", `<label for="${name}">${field.label}<span><input id="${name}"`
        + ` name="${name}" inputmode="decimal" autocomplete="off" size="7"> ${unitOf(name, field)}</span></label>`);
      const { units } = field;
      const [, size] = units.findLast(([, each]) => values[name] >= each) ?? units[0];
      if (units.length > 1) $(`${name}-unit`).value = size;
    }
    show();
  }

  function show() {
    for (const [name, field] of entries) $(name).value = Number((values[name] / sizeOf(name, field)).toPrecision(12));
  }

  /** Take over what is typed. What is no number within the limits is named, and is not used. */
  function read() {
    const complaints = [];
    for (const [name, field] of entries) {
      const { label, units: [[unit]], limits, isWhole } = field;
      const size = sizeOf(name, field);
      const value = typed($(name).value, limits.map((limit) => limit / size), NaN);
      const isWrong = Number.isNaN(value) || (Boolean(isWhole) && !Number.isInteger(value));
      $(name).setAttribute("aria-invalid", isWrong);
      if (!isWrong) values[name] = value * size;
      else if (!$(name).closest("[hidden]")) {
        const [least, most] = limits.map(field.say ?? ((limit) => number(limit / size)));
        complaints.push(`${label}: give ${isWhole ? "a whole number" : "a number"} from ${least} to ${most}`
          + `${unit && !field.say ? ` ${unit}` : ""}.`);
      }
    }
    $("complaint").textContent = complaints.join(" ");
  }

  return { put, show, read };
}

/** A table's rows: the first cell of each is its name. Cells are HTML. */
function table(heads, rows) {
  const head = heads.map((name) => (name ? `<th scope="col">${name}</th>` : "<td></td>")).join("");
  const body = rows.map(([name, ...cells]) =>
    `<tr><th scope="row">${name}</th>`
    + `${cells.map((cell, i) => `<td data-head="${heads[i + 1]}">${cell}</td>`).join("")}</tr>`);
  return `<thead><tr>${head}</tr></thead><tbody>${body.join("")}</tbody>`;
}

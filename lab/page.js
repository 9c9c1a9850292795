// What pages to play with have in common: numbers in words, and choices.

const $ = (id) => document.getElementById(id);
const text = (value) => String(value).replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);
const number = (value) => String(Number(value.toPrecision(4)));
const log2Up = (n) => Math.ceil(Math.log2(n));
const percent = (share) => `${(100 * share).toFixed(1)} %`;

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

function inUnit(value, units) {
  const [name, unit] = units.find(([, each]) => Math.abs(value) >= each * 0.99995) ?? units.at(-1);
  return `${Number((value / unit).toPrecision(4))} ${name}`;
}
const seconds = (value) => (value ? inUnit(value, [["s", 1], ["ms", 1e-3], ["µs", 1e-6], ["ns", 1e-9]]) : "0 s");
const bytes = (value) => inUnit(value, [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3], ["bytes", 1]]);

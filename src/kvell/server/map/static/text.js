// Numbers as people read them, and small pieces of the document.

const UNITS = ["bytes", "KiB", "MiB", "GiB", "TiB"];

const byId = (id) => document.getElementById(id);

function bytes(count) {
  const unit = count > 0 ? Math.min(UNITS.length - 1, Math.floor(Math.log2(count) / 10)) : 0;
  const value = count / 1024 ** unit;
  return `${value.toFixed(unit && value < 100 ? 1 : 0)} ${UNITS[unit]}`;
}

function seconds(value) {
  if (value === null) return "–";
  return value < 1 ? `${(value * 1000).toFixed(value < 0.1 ? 1 : 0)} ms` : `${value.toFixed(2)} s`;
}

function percent(part) {
  return part === null ? "–" : `${(100 * part).toFixed(1)} %`;
}

function rate(value) {
  if (value === null) return "–";
  return value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 });
}

function count(number, one, many = `${one}s`) {
  return `${number.toLocaleString("en")} ${number === 1 ? one : many}`;
}

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

// Nothing is written that is there already: what a reader has selected stays selected.
function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

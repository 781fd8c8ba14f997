// Colours come from the style sheet, so that light and dark are decided in one place.

const HUES = 8;
const TONES = 8;

function channels(colour) {
  const value = Number.parseInt(colour.trim().slice(1), 16);
  return [value >> 16, (value >> 8) & 255, value & 255];
}

function mixed(from, to, part) {
  const mix = from.map((value, i) => Math.round(value + (to[i] - value) * part));
  return `rgb(${mix.join(" ")})`;
}

class Colours {
  constructor() {
    const style = getComputedStyle(document.documentElement);
    const named = (name) => style.getPropertyValue(`--${name}`).trim();
    this.ink = named("ink");
    this.line = named("line");
    this.focus = named("focus");
    this.empty = named("empty");
    this.withheld = named("withheld");
    this.loan = named("loan");
    this.hues = Array.from({ length: HUES }, (_, i) => named(`group-${i}`));
    const empty = channels(this.empty);
    const tones = (from, range) => this.hues.map((hue) => Array.from(
      { length: TONES + 1 }, (_, i) => mixed(empty, channels(hue), from + (range * i) / TONES)));
    this.usedByAll = mixed(empty, channels(this.ink), 0.62);
    this.cachedByAll = mixed(empty, channels(this.ink), 0.22);
    this.usedTones = tones(0.55, 0.45);
    this.cachedTones = tones(0.14, 0.24);
  }

  hue(group) { return this.hues[group % HUES]; }

  used(group, part) { return this.usedTones[group % HUES][Math.round(part * TONES)]; }

  cached(group, part) { return this.cachedTones[group % HUES][Math.round(part * TONES)]; }

  cell(columns, index) {
    const state = columns.state(index);
    if (state === "withheld") return this.withheld;
    if (state === "empty") return this.empty;
    if (columns.isLent(index)) return this.loan;
    const group = columns.group[index];
    const capacity = columns.groups[group].pages_per_large;
    return state === "used" ? this.used(group, columns.used[index] / capacity)
      : this.cached(group, columns.cached[index] / capacity);
  }
}

let colours = new Colours();

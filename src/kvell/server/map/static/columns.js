// The columns of an instance's large pages: little-endian integers in base64.

const WITHHELD = -2;
const EMPTY = -1;

function decoded(text, Kind) {
  const raw = atob(text);
  const content = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i += 1) content[i] = raw.charCodeAt(i);
  return new Kind(content.buffer);
}

class Columns {
  constructor(pages) {
    this.groups = pages.groups;
    this.group = decoded(pages.columns.group, Int16Array);
    this.used = decoded(pages.columns.used, Uint32Array);
    this.cached = decoded(pages.columns.cached, Uint32Array);
    this.age = decoded(pages.columns.age, Uint32Array);
    this.lent = decoded(pages.columns.lent, Uint32Array); // empty if no page is lent
  }

  get length() { return this.group.length; }

  // Large pages by state: one with any used page is used.  Lent pages are used ones.
  tally() {
    const tally = { total: this.length, used: 0, cached: 0, withheld: 0, empty: 0, lent: 0 };
    for (let i = 0; i < this.length; i += 1) {
      tally[this.state(i)] += 1;
      tally.lent += this.isLent(i);
    }
    return tally;
  }

  isLent(index) { return this.lent.length > 0 && this.lent[index] > 0; }

  state(index) {
    if (this.group[index] === WITHHELD) return "withheld";
    if (this.group[index] === EMPTY) return "empty";
    if (this.used[index]) return "used";
    return this.cached[index] ? "cached" : "empty";
  }

  free(index) {
    return this.groups[this.group[index]].pages_per_large - this.used[index] - this.cached[index];
  }
}

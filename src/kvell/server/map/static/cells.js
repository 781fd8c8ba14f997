// The map: a cell for every large page, row by row, and one that is looked at.

const MOST_CELL_PIXELS = 18;
const LEAST_CELL_PIXELS = 4;
const WANTED_HEIGHT_PIXELS = 260;

function sharp(canvas, width, height) {
  const scale = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  return context;
}

class CellMap {
  constructor(canvas, looked) {
    this.canvas = canvas;
    this.looked = looked;
    this.columns = null;
    this.at = null;
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerdown", (event) => this.point(event));
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("focus", () => { if (this.at === null) this.look(0); });
  }

  show(columns, colours) {
    this.columns = columns;
    this.colours = colours;
    if (this.at !== null && this.at >= columns.length) this.at = null;
    this.draw();
  }

  layOut() {
    const width = this.canvas.clientWidth;
    const fitting = Math.floor(Math.sqrt((width * WANTED_HEIGHT_PIXELS) / this.columns.length));
    this.size = Math.max(LEAST_CELL_PIXELS, Math.min(MOST_CELL_PIXELS, fitting));
    this.across = Math.max(1, Math.floor(width / this.size));
    return Math.ceil(this.columns.length / this.across) * this.size;
  }

  draw() {
    if (this.columns === null || !this.columns.length || !this.canvas.clientWidth) return;
    const height = this.layOut();
    const context = sharp(this.canvas, this.canvas.clientWidth, height);
    const gap = this.size > 5 ? 1 : 0.5;
    for (let i = 0; i < this.columns.length; i += 1) {
      const [x, y] = this.place(i);
      context.fillStyle = this.colours.cell(this.columns, i);
      context.fillRect(x, y, this.size - gap, this.size - gap);
      if (this.columns.group[i] === WITHHELD && this.size > 6) this.strike(context, x, y, gap);
      if (this.columns.isLent(i) && this.size > 6) this.hole(context, x, y, gap);
    }
    if (this.at !== null) {
      const [x, y] = this.place(this.at);
      context.strokeStyle = this.colours.focus;
      context.lineWidth = 2;
      context.strokeRect(x - 1, y - 1, this.size + 1, this.size + 1);
    }
  }

  strike(context, x, y, gap) {
    context.strokeStyle = this.colours.empty;
    context.beginPath();
    context.moveTo(x, y + this.size - gap);
    context.lineTo(x + this.size - gap, y);
    context.stroke();
  }

  // The mark of a loan: it is seen without its colour too.
  hole(context, x, y, gap) {
    const third = (this.size - gap) / 3;
    context.fillStyle = this.colours.empty;
    context.fillRect(x + third, y + third, third, third);
  }

  place(index) {
    return [(index % this.across) * this.size, Math.floor(index / this.across) * this.size];
  }

  point(event) {
    if (this.columns === null) return;
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / this.size);
    const index = Math.floor((event.clientY - box.top) / this.size) * this.across + column;
    if (column < this.across && index >= 0 && index < this.columns.length) this.look(index);
  }

  key(event) {
    if (this.columns === null || !this.columns.length) return;
    const last = this.columns.length - 1;
    const steps = {
      ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.across, ArrowDown: this.across,
    };
    let next = this.at ?? 0;
    if (event.key in steps) next += steps[event.key];
    else if (event.key === "Home") next = 0;
    else if (event.key === "End") next = last;
    else return;
    event.preventDefault();
    if (next >= 0 && next <= last) this.look(next);
  }

  look(index) {
    if (this.columns === null || index === this.at) return;
    this.at = index;
    this.draw();
    this.looked(index);
  }
}

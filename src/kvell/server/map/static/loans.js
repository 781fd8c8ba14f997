// The loans of an instance: a cell for each section that it borrows or lends, by the other side.

const MOST_LOAN_CELLS = 128;

class LoansView {
  constructor(box) {
    this.box = box;
    this.shown = null;
  }

  show(loans) {
    const sides = [...loans.borrows.map((loan) => ["borrowed", loan]),
      ...loans.lends.map((loan) => ["lent", loan])];
    const shown = JSON.stringify(sides);
    if (shown === this.shown) return;
    this.shown = shown;
    this.box.hidden = !sides.length;
    this.box.replaceChildren(...sides.map(([side, loan]) => this.line(side, loan, loans)));
  }

  line(side, loan, loans) {
    const text = side === "lent" ? `lends ${loan.sections} to ${loan.peer}`
      : `borrows ${loan.sections} from ${loan.peer}`;
    const size = loans.section_bytes ? bytes(loans.section_bytes) : "unknown size";
    const place = side === "lent" ? `lent to ${loan.peer}` : `stored at ${loan.peer}`;
    const title = `a section of ${loans.section_tokens} tokens (${size}), ${place}`;
    const cells = Array.from({ length: Math.min(loan.sections, MOST_LOAN_CELLS) }, () => (
      element("span", { className: `loan ${side}`, title })));
    const more = loan.sections - cells.length;
    const row = element("span", { className: "loan-cells", ariaHidden: "true" }, ...cells);
    const total = loans.section_bytes ? `, ${bytes(loan.sections * loans.section_bytes)}` : "";
    const line = element("div", { className: "loan-line" }, row, more ? `+ ${more} ` : "",
      element("strong", { textContent: text }),
      element("span", { className: "quiet", textContent:
        ` ${loans.section_tokens} tokens each${total}` }));
    line.dataset.peer = loan.peer;
    return line;
  }
}

/* What moves on a page of this book: instruments, definitions of terms, figures that enlarge, tables that sort or fit a phone, folded lines of code.
   Plain DOM and SVG. Without this script every page is complete; what it adds is marked in book.css. */
"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";

  function make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value !== false && value != null) element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...children);
    return element;
  }

  function draw(tag, attributes, text) {
    const element = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (text !== undefined) element.textContent = text;
    return element;
  }

  const still = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

  /* ------------------------------------------------------------------------------------------------- instruments */

  /** A panel of cells as SVG: {name, label, rows, columns}. */
  class Panel {
    constructor(panel, width) {
      Object.assign(this, panel);
      this.count = this.rows * this.columns;
      const room = width - 4;
      if (this.rows === 1 && room / this.columns < 14) {
        this.rows = Math.ceil((this.columns * 14) / room);
        this.columns = Math.ceil(this.columns / this.rows);
      }
      this.size = Math.max(5, Math.min(28, room / this.columns));
      this.svg = draw("svg", {
        viewBox: `0 0 ${this.columns * this.size} ${this.rows * this.size}`,
        width: this.columns * this.size,
        height: this.rows * this.size,
        "aria-hidden": "true",
      });
      this.cells = [];
      this.words = [];
      for (let i = 0; i < this.count; i++) {
        const x = (i % this.columns) * this.size;
        const y = Math.floor(i / this.columns) * this.size;
        const side = this.size - (this.size > 8 ? 2 : 1);
        this.cells.push(draw("rect", { x, y, width: side, height: side, rx: this.size > 12 ? 3 : 1, class: "c-none" }));
        this.words.push(
          draw("text", { x: x + side / 2, y: y + side / 2, class: "word", style: `font-size: ${Math.min(11, this.size * 0.42)}px` }, ""),
        );
      }
      this.svg.append(...this.cells, ...this.words);
    }

    show(codes, words, touched) {
      for (let i = 0; i < this.count; i++) {
        this.cells[i].setAttribute("class", `c-${codes[i] === "." ? "none" : codes[i]}${touched.has(i) ? " now" : ""}`);
        this.words[i].textContent = words[i];
      }
    }
  }

  /** One instrument: a prediction is locked in or skipped, the run that the question is about plays, and at its end stand the answer
      and all runs side by side. */
  class Instrument {
    constructor(box, recording, number) {
      this.box = box;
      this.data = recording;
      this.id = `instrument-${number}`;
      this.run = recording.runs[0];
      this.at = 0;
      this.timer = null;
      const caption = [...box.children].filter((child) => child.tagName === "P");
      this.bench = make("div", { class: "bench" });
      box.querySelector(".still").after(this.bench);
      box.classList.add("live");
      this.bench.append(this.prediction(), this.controls(), this.stage(), this.truth());
      this.bench.after(...caption.slice(1));
      this.lock(false);
      this.choose(0);
    }

    prediction() {
      const { question, choices } = this.data;
      this.answer = null;
      const options = choices.map((choice, i) =>
        make(
          "label",
          {},
          make("input", {
            type: "radio",
            name: `${this.id}-answer`,
            value: i,
            onchange: () => {
              this.answer = i;
              this.commit.disabled = false;
            },
          }),
          make("span", {}, choice),
        ),
      );
      this.commit = make("button", { type: "button", class: "commit", disabled: true, onclick: () => this.lock(true) }, "Lock in my prediction");
      this.skip = make("button", { type: "button", class: "skip", onclick: () => this.lock(true) }, "Skip, just show me");
      this.question = make(
        "fieldset",
        { class: "prediction" },
        make("legend", {}, question),
        make("div", { class: "choices" }, ...options),
        this.commit,
        " ",
        this.skip,
      );
      return this.question;
    }

    controls() {
      this.settings = make(
        "fieldset",
        { class: "settings" },
        make("legend", {}, this.data.control),
        make(
          "div",
          { class: "choices" },
          ...this.data.runs.map((run, i) =>
            make(
              "label",
              {},
              make("input", {
                type: "radio",
                name: `${this.id}-run`,
                value: i,
                checked: i === 0,
                onchange: () => this.choose(i),
              }),
              make("span", {}, run.name),
            ),
          ),
        ),
      );
      return this.settings;
    }

    stage() {
      const width = Math.min(640, this.box.clientWidth - 34 || 320);
      this.panels = this.data.panels.map((panel) => new Panel(panel, width));
      const figure = make("div", { class: "panels", role: "img", "aria-label": this.data.title });
      this.figure = figure;
      for (const panel of this.panels) {
        figure.append(make("div", { class: "panel" }, make("div", { class: "panel-name" }, panel.label), panel.svg));
      }
      const legend = make("div", { class: "legend" });
      for (const [code, meaning] of Object.entries(this.data.legend || {})) {
        const chip = draw("svg", { width: 12, height: 12, "aria-hidden": "true" });
        chip.append(draw("rect", { width: 12, height: 12, rx: 2, class: `c-${code}` }));
        legend.append(make("span", {}, chip, ` ${meaning}`));
      }
      const outline = draw("svg", { width: 14, height: 14, "aria-hidden": "true" });
      outline.append(draw("rect", { x: 1, y: 1, width: 12, height: 12, rx: 2, class: "c-none now" }));
      legend.append(make("span", {}, outline, " touched by this step"));
      this.slider = make("input", {
        type: "range",
        min: 0,
        value: 0,
        "aria-label": "step",
        oninput: () => this.show(Number(this.slider.value)),
      });
      const step = (text, label, by) =>
        make("button", { type: "button", "aria-label": label, onclick: () => this.show(this.at + by) }, text);
      this.back = step("‹", "one step back", -1);
      this.forth = step("›", "one step on", 1);
      this.play = make("button", { type: "button", class: "play", onclick: () => this.toggle() }, "Play");
      this.note = make("p", { class: "note", "aria-live": "polite" });
      this.facts = make("dl", { class: "facts" });
      this.player = make("div", { class: "player" }, this.back, this.slider, this.forth, this.play);
      return make("div", { class: "stage" }, figure, legend, this.player, this.note, this.facts);
    }

    truth() {
      this.verdict = make("p", { class: "verdict", "aria-live": "polite" });
      this.beside = make("div", { class: "beside" });
      return make("div", {}, this.verdict, this.beside);
    }

    lock(committed) {
      this.committed = committed;
      for (const control of this.question.querySelectorAll("input")) control.disabled = committed;
      if (committed) {
        this.commit.textContent = this.answer === null ? "Skipped" : "Locked in";
        this.skip.remove();
      }
      this.commit.disabled = true;
      for (const part of [this.settings, this.player]) {
        for (const control of part.querySelectorAll("input, button")) control.disabled = !committed;
      }
      this.bench.classList.toggle("open", committed);
      if (!committed) return;
      // The run that the question is about.
      const asked = this.settings.querySelectorAll("input")[this.data.asked];
      asked.checked = true;
      this.choose(this.data.asked);
      this.play.focus({ preventScroll: true });
    }

    choose(index) {
      this.stop();
      this.run = this.data.runs[index];
      this.slider.max = this.run.frames.length - 1;
      this.facts.replaceChildren();
      this.show(0);
    }

    toggle() {
      if (this.timer) return this.stop();
      if (still()) return this.show(this.run.frames.length - 1);
      if (this.at === this.run.frames.length - 1) this.show(0);
      this.play.textContent = "Stop";
      const pause = Math.max(90, Math.min(700, 9000 / this.run.frames.length));
      this.timer = setInterval(() => {
        if (this.at >= this.run.frames.length - 1) this.stop();
        else this.show(this.at + 1);
      }, pause);
    }

    stop() {
      clearInterval(this.timer);
      this.timer = null;
      this.play.textContent = "Play";
    }

    show(frame) {
      const last = this.run.frames.length - 1;
      this.at = Math.max(0, Math.min(last, frame));
      const state = new Map(
        this.panels.map((panel) => [panel.name, [Array(panel.count).fill("."), Array(panel.count).fill("")]]),
      );
      const touched = new Map(this.panels.map((panel) => [panel.name, new Set()]));
      for (let i = 0; i <= this.at; i++) {
        for (const [name, start, codes, words] of this.run.frames[i].set || []) {
          const [cells, texts] = state.get(name);
          for (let j = 0; j < codes.length; j++) {
            cells[start + j] = codes[j];
            if (words) texts[start + j] = words[j];
            if (i === this.at) touched.get(name).add(start + j);
          }
        }
      }
      for (const panel of this.panels) panel.show(...state.get(panel.name), touched.get(panel.name));
      this.slider.value = this.at;
      const note = this.run.frames[this.at].note || "";
      this.slider.setAttribute("aria-valuetext", `${this.at + 1} of ${last + 1}: ${note}`);
      this.note.textContent = note;
      this.back.disabled = !this.committed || this.at === 0;
      this.forth.disabled = !this.committed || this.at === last;
      if (!this.committed) return;
      if (this.at === last) {
        this.facts.replaceChildren(
          ...Object.entries(this.run.facts).flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, String(value))]),
        );
        if (this.run === this.data.runs[this.data.asked]) this.tell();
      }
    }

    /** The answer, and what all runs came to. */
    tell() {
      const right = this.answer === this.data.answer;
      const said = this.answer === null ? "The answer" : right ? "You were right" : "Not what you predicted";
      this.verdict.textContent = `${said}: ${this.data.choices[this.data.answer]}. ${this.data.because}`;
      if (this.answer !== null) this.verdict.dataset.right = right;
      const names = Object.keys(this.run.facts);
      const head = make("tr", {}, ...[this.data.control, ...names].map((name) => make("th", { scope: "col" }, name)));
      const rows = this.data.runs.map((run) =>
        make(
          "tr",
          { class: run === this.run ? "asked" : false },
          make("th", { scope: "row" }, run.name),
          ...names.map((name) => make("td", {}, String(run.facts[name]))),
        ),
      );
      this.beside.replaceChildren(make("table", { class: "points" }, make("thead", {}, head), make("tbody", {}, ...rows)));
    }
  }

  /* ------------------------------------------------------------------------------------------------- definitions */

  function definitions() {
    const data = document.getElementById("book-terms");
    if (!data) return;
    const terms = JSON.parse(data.textContent);
    const tip = make("div", { role: "tooltip", id: "term-tip", hidden: true });
    document.body.append(tip);
    let shown = null;

    function open(link, name) {
      shown = link;
      tip.textContent = terms[name];
      tip.hidden = false;
      link.setAttribute("aria-describedby", "term-tip");
      const box = link.getBoundingClientRect();
      const width = Math.min(340, document.documentElement.clientWidth - 16);
      tip.style.width = `${width}px`;
      tip.style.left = `${Math.max(8, Math.min(box.left, document.documentElement.clientWidth - width - 8)) + scrollX}px`;
      const above = box.bottom + tip.offsetHeight + 12 > innerHeight && box.top > tip.offsetHeight + 12;
      tip.style.top = `${scrollY + (above ? box.top - tip.offsetHeight - 6 : box.bottom + 6)}px`;
    }

    function close() {
      if (shown) shown.removeAttribute("aria-describedby");
      shown = null;
      tip.hidden = true;
    }

    for (const link of document.querySelectorAll('a[href*="notation.html#term-"]')) {
      const name = link.hash.slice(1);
      if (!(name in terms)) continue;
      link.removeAttribute("title");
      let touch = false;
      link.addEventListener("pointerdown", (event) => (touch = event.pointerType === "touch"));
      link.addEventListener("pointerenter", (event) => event.pointerType === "mouse" && open(link, name));
      link.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && close());
      link.addEventListener("focus", () => !touch && open(link, name));
      link.addEventListener("blur", close);
      // The first tap shows what the word means, the second one goes to the glossary.
      link.addEventListener("click", (event) => {
        if (touch && shown !== link) {
          event.preventDefault();
          open(link, name);
        }
      });
    }
    document.addEventListener("keydown", (event) => event.key === "Escape" && close());
    document.addEventListener("pointerdown", (event) => {
      if (shown && !shown.contains(event.target) && !tip.contains(event.target)) close();
    });
  }

  /* ---------------------------------------------------------------------------------------------------- formulas */

  /** A comma or a full stop stays on the line of the formula that it follows. */
  function punctuation() {
    for (const formula of document.querySelectorAll(".bd-article span.math")) {
      const next = formula.nextSibling;
      const sign = next instanceof Text ? next.data.match(/^[.,;:)?!]+/)?.[0] : undefined;
      if (!sign) continue;
      next.data = next.data.slice(sign.length);
      const kept = make("span", { class: "kept" });
      formula.replaceWith(kept);
      kept.append(formula, sign);
    }
  }

  /* ----------------------------------------------------------------------------------------------------- figures */

  function figures() {
    const dialog = make("dialog", { class: "enlarged", "aria-label": "Enlarged figure" });
    const close = make("button", { type: "button", class: "close", onclick: () => dialog.close() }, "Close");
    dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
    document.body.append(dialog);
    for (const image of document.querySelectorAll(".bd-article figure img, .bd-article .cell_output img")) {
      if (image.closest("a, .sd-card, .enlarge")) continue;
      // What a phone shows of it, below one another.
      const views = [];
      for (let next = image.nextElementSibling; next?.matches(".phone-view"); next = next.nextElementSibling) views.push(next);
      const button = make("button", { type: "button", class: "enlarge", "aria-label": `Enlarge: ${image.alt || "figure"}` });
      // A chart that is drawn small is legible on a phone as a whole.
      const fits = () => /\.png$/.test(image.src) && image.naturalWidth <= 840 && image.classList.add("fits");
      if (image.complete) fits();
      else image.addEventListener("load", fits, { once: true });
      image.replaceWith(button);
      button.append(image, ...views);
      button.addEventListener("click", () => {
        const copy = image.cloneNode();
        copy.removeAttribute("style");
        copy.removeAttribute("width");
        copy.removeAttribute("height");
        dialog.replaceChildren(close, make("div", { class: "canvas", tabindex: 0 }, copy));
        dialog.showModal();
      });
    }
  }

  /* ------------------------------------------------------------------------------------------------------ tables */

  /** What a cell is sorted by: data-sort, else the number that it begins with, else its text. */
  function key(row, column) {
    const cell = row.cells[column];
    const text = cell.dataset.sort ?? cell.textContent.trim();
    const number = parseFloat(text.replaceAll(",", ""));
    return Number.isNaN(number) ? text.toLowerCase() : number;
  }

  /** Makes the heads of a table's columns into buttons that sort by them; empty cells stay below. */
  function sortable(table) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      if (head.querySelector("button") || !head.textContent.trim()) return;
      const button = make("button", { type: "button", class: "sort" }, ...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        // Numbers are wanted from the largest on, words from A on.
        const rows = [...table.tBodies[0].rows];
        const numbers = rows.some((row) => typeof key(row, column) === "number");
        const before = head.getAttribute("aria-sort");
        const down = before ? before === "ascending" : numbers;
        for (const other of heads) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const compare = (a, b) => {
          const [x, y] = [key(a, column), key(b, column)];
          if (x === "" || y === "") return (x === "") - (y === "");
          if (typeof x !== typeof y) return typeof x === "number" ? -1 : 1;
          return (x < y ? -1 : x > y ? 1 : 0) * (down ? -1 : 1);
        };
        table.tBodies[0].append(...rows.sort(compare));
      });
    });
  }

  /** Tables that do not fit into a phone get `blocks`: there a row is a block, each cell under its column's name. */
  function blocks() {
    if (!matchMedia("(max-width: 600px)").matches) return;
    for (const table of document.querySelectorAll(".bd-article table:not([class*='blocks'], .sortable, .stacked)")) {
      const room = table.closest(".pst-scrollable-table-container, .wide-table, .sd-tab-content, .output") ?? table.parentElement;
      const rows = [...table.rows];
      const heads = [...(table.tHead?.rows[0]?.cells ?? [])];
      // Not a table of tables, and not so long that blocks would be a page of their own.
      if (table.offsetWidth <= room.clientWidth + 1 || table.tHead?.rows.length !== 1 || rows.length > 40) continue;
      if (rows.some((row) => row.cells.length !== heads.length) || table.id || table.closest(".look-up, .instrument")) continue;
      table.classList.add("blocks");
      for (const row of rows.slice(1)) {
        [...row.cells].forEach((cell, i) => {
          // A first cell names what its row is about, unless it is a number.
          if (i || /^[\d.,]+$/.test(cell.textContent.trim())) cell.dataset.label = heads[i].textContent.trim();
        });
      }
    }
  }

  /** The look-up of the page "Measured": points of one function on one GPU, narrowed down by words. */
  function lookUp(box) {
    const { columns, rows } = JSON.parse(box.querySelector("script").textContent);
    const MOST = 40; // rows that show
    const values = (column, those = rows) => [...new Set(those.map((row) => row[column]))];
    const select = (name, onchange) => {
      const element = make("select", { onchange });
      return [element, make("label", {}, name, element)];
    };
    const fill = (element, names) => {
      const kept = element.value;
      element.replaceChildren(...names.map((name) => make("option", { value: name, selected: name === kept }, name)));
    };
    const [gpu, gpuLabel] = select("GPU", () => narrow());
    const [name, nameLabel] = select("function", () => narrow());
    const [pass, passLabel] = select("pass", () => show());
    const words = make("input", { type: "search", placeholder: "N=4096", oninput: () => show() });
    const count = make("p", { "aria-live": "polite", class: "count" });
    const table = make("table", { class: "points blocks" });
    box.append(
      make("div", { class: "look-up-form" }, gpuLabel, nameLabel, passLabel, make("label", {}, "shape or baseline", words)),
      count,
      make("div", { class: "wide-table" }, table),
    );

    function narrow() {
      fill(name, values(1, rows.filter((row) => row[0] === gpu.value)).sort());
      fill(pass, values(2, rows.filter((row) => row[0] === gpu.value && row[1] === name.value)));
      show();
    }

    function show() {
      const asked = words.value.trim().split(/\s+/).filter(Boolean);
      const fits = (row) => {
        const text = `${row[3]} ${row[4]} ${row[6]} `;
        return asked.every((word) => (word.includes("=") ? ` ${text}`.includes(` ${word} `) : text.includes(word)));
      };
      const found = rows.filter((row) => row[0] === gpu.value && row[1] === name.value && row[2] === pass.value && fits(row));
      const slower = (column) => found.filter((row) => row[column] === "slower").length;
      const python = found.some((row) => row[10] !== null) ? `at ${slower(11)} from Python` : "from Python not compared";
      count.textContent = found.length
        ? `${found.length} ${found.length === 1 ? "point" : "points"}; slower at ${slower(9)} on the device, ${python}.` +
          (found.length > MOST ? ` The first ${MOST} are shown.` : "")
        : "No point is recorded for that.";
      const shown = [4, 8, 10, 5, 6, 7, 3];
      const cell = (row, column) => {
        const verdict = column >= 8 ? row[column + 1] : "";
        const value = row[column] === null ? "" : column >= 8 ? row[column].toFixed(2) : row[column].toLocaleString("en");
        return make("td", { class: verdict === "faster" || verdict === "slower" ? verdict : false, "data-label": column === 4 ? false : columns[column] }, value);
      };
      table.replaceChildren(
        make("thead", {}, make("tr", {}, ...shown.map((column) => make("th", { scope: "col" }, columns[column])))),
        make("tbody", {}, ...found.slice(0, MOST).map((row) => make("tr", {}, ...shown.map((column) => cell(row, column))))),
      );
      sortable(table);
    }

    fill(gpu, values(0));
    fill(name, [rows[0][1]]); // what the page begins with, not the alphabet
    narrow();
  }

  /* -------------------------------------------------------------------------------------------------------- code */

  /** The lines of a listing, each as the list of its nodes. */
  function linesOf(pre) {
    const lines = [[]];
    for (const node of [...pre.childNodes]) {
      if (node.nodeType === Node.TEXT_NODE) {
        node.data.split(/(?<=\n)/).forEach((part) => {
          lines.at(-1).push(document.createTextNode(part));
          if (part.endsWith("\n")) lines.push([]);
        });
      } else {
        lines.at(-1).push(node);
        if (node.textContent.endsWith("\n")) lines.push([]); // a highlighted line holds its own end
      }
    }
    if (!lines.at(-1).length) lines.pop();
    return lines;
  }

  /** A line that, where it has to be wrapped, goes on further in than it began. */
  function line(nodes, narrow = false) {
    const text = nodes.map((node) => node.textContent).join("");
    const indent = text.match(/^ */)[0].length + 4;
    const element = make("span", { class: narrow ? "line narrow" : "line", style: `--indent:${indent}ch` });
    element.append(...nodes);
    return element;
  }

  function unfolding(label, spoken, show) {
    const button = make("button", { type: "button", class: "unfold", "data-label": label, "aria-label": spoken, "aria-expanded": "false" });
    button.addEventListener("click", () => button.setAttribute("aria-expanded", String(show())));
    return button;
  }

  /** Folds what an author marked, from a line "# region WORDS" to "# endregion", and nothing else. The text stays, so that copying copies all. */
  function folds() {
    for (const pre of document.querySelectorAll(".bd-article :is(.highlight-python, .highlight-ipython3) pre")) {
      const lines = linesOf(pre);
      const texts = lines.map((nodes) => nodes.map((node) => node.textContent).join("").trim());
      const blank = (i) => texts[i] === "" && i > 0 && texts[i - 1] === "";
      const pieces = [];
      for (let i = 0; i < lines.length; i++) {
        const words = texts[i].match(/^# region (.+)/);
        const end = words ? texts.indexOf("# endregion", i) : -1;
        if (end < 0) {
          pieces.push(line(lines[i], blank(i)));
          continue;
        }
        const run = make("span", { class: "same", hidden: true });
        run.append(...lines.slice(i, end + 1).map((nodes) => line(nodes)));
        const count = texts.slice(i + 1, end).filter(Boolean).length;
        const said = `${count} ${count === 1 ? "line" : "lines"}: ${words[1]}`;
        pieces.push(unfolding(said, `show ${said}`, () => !(run.hidden = !run.hidden)), run);
        i = end;
      }
      pre.replaceChildren(...pieces);
    }
    // What scrolls has to be reachable by keyboard.
    for (const box of document.querySelectorAll(".bd-article pre, .bd-article .pst-scrollable-table-container, .bd-article .output, .bd-article .sd-tab-content, .bd-article .formula")) {
      if (box.scrollWidth <= box.clientWidth) continue;
      box.tabIndex = 0;
      box.classList.add("scrolls");
    }
  }

  /** A link to something that is folded unfolds it. */
  function reveal() {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    for (let box = target; box; box = box.parentElement) if (box.tagName === "DETAILS") box.open = true;
    // Also where the heading itself stands before the fold.
    const own = target.tagName === "SECTION" && target.querySelector(":scope > details.section");
    if (own) own.open = true;
    target.scrollIntoView();
  }

  function start() {
    addEventListener("hashchange", reveal);
    reveal();
    folds();
    punctuation();
    figures();
    definitions();
    document.querySelectorAll("table.sortable").forEach(sortable);
    blocks();
    // A phone is turned; what was hidden has a width when it shows.
    addEventListener("resize", blocks);
    document.addEventListener("toggle", blocks, true);
    document.addEventListener("change", blocks);
    document.querySelectorAll(".look-up").forEach(lookUp);
    document.querySelectorAll(".instrument").forEach((box, i) => {
      new Instrument(box, JSON.parse(box.querySelector(".recording").textContent), i);
    });
  }

  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();

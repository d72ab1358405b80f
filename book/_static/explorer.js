// Figures with sliders. The numbers stand in the page as JSON (see nqflib/explorer.py); this script draws them as SVG
// in place of the still figure, which remains for print and for readers without scripts.
document.addEventListener("DOMContentLoaded", () => {
  const { element, shaded, superscript, svg } = Nodes;
  for (const box of document.querySelectorAll(".nqf-explorer")) start(box);

  function start(box) {
    const { sliders, panels, arrays, frames } = JSON.parse(box.querySelector("script").textContent);
    const still = box.parentElement.querySelector(".nqf-themes");
    const alt = still.querySelector("img").alt;
    const chosen = sliders.map((slider) => slider.start);

    const form = element("form", { class: "nqf-sliders" });
    form.addEventListener("submit", (event) => event.preventDefault());
    sliders.forEach((slider, i) => {
      const label = element("label");
      const input = element("input", { type: "range", min: 0, max: slider.values.length - 1, step: 1 });
      const value = element("span", { class: "nqf-slider-value" });
      const tell = () => {
        value.textContent = slider.values[chosen[i]];
        input.setAttribute("aria-valuetext", slider.values[chosen[i]]);
      };
      input.value = slider.start;
      input.addEventListener("input", () => {
        chosen[i] = Number(input.value);
        tell();
        draw();
      });
      tell();
      label.append(element("span", {}, slider.label), input, value);
      form.append(label);
    });
    const drawing = element("div", { class: "nqf-panels", role: "img" });
    const sentence = element("output", { class: "nqf-frame-text", "aria-live": "polite" });
    box.append(form, drawing, sentence);
    box.parentElement.classList.add("nqf-live");
    draw();
    new ResizeObserver(draw).observe(drawing);

    function draw() {
      const frame = frames[chosen.reduce((index, at, i) => index * sliders[i].values.length + at, 0)];
      sentence.textContent = frame.text;
      drawing.setAttribute("aria-label", `${alt} ${frame.text}`);
      const width = drawing.clientWidth;
      if (!width) return;
      const columns = Math.min(panels.length, Math.max(1, Math.floor(width / 215)));
      const each = Math.floor((width - 12 * (columns - 1)) / columns);
      drawing.replaceChildren(
        ...panels.map((panel, i) =>
          plot(panel, frame.curves[i].map(([x, y]) => [arrays[x], arrays[y]]), each, Math.min(300, 0.8 * each + 40)),
        ),
      );
    }
  }

  function plot(panel, curves, width, height) {
    const box = element("div", { class: "nqf-panel", style: `width: ${width}px` });
    const key = element("ul");
    key.append(...panel.series.filter((s) => s.label).map((s) => shaded(element("li", { class: `nqf-${s.mark}` }, s.label), s.color)));
    const [left, right, top, bottom] = [58, 8, 8, 44];
    const across = scale(panel.x, left, width - right);
    const up = scale(panel.y, height - bottom, top);
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" });
    const clip = `clip-${(plot.count = (plot.count || 0) + 1)}`;
    const frame = { x: left, y: top, width: width - left - right, height: height - top - bottom };
    const window_ = svg("clipPath", { id: clip });
    window_.append(svg("rect", frame));
    picture.append(window_);
    for (const [value, text] of ticks(panel.x, width < 320 ? 4 : 6)) {
      const x = across(value);
      picture.append(svg("line", { x1: x, x2: x, y1: top, y2: height - bottom, class: "nqf-grid" }));
      picture.append(svg("text", { x, y: height - bottom + 17, "text-anchor": "middle" }, text));
    }
    for (const [value, text] of ticks(panel.y, 6)) {
      const y = up(value);
      picture.append(svg("line", { x1: left, x2: width - right, y1: y, y2: y, class: "nqf-grid" }));
      picture.append(svg("text", { x: left - 6, y: y + 4, "text-anchor": "end" }, text));
    }
    picture.append(svg("text", { x: left + frame.width / 2, y: height - 6, "text-anchor": "middle" }, panel.x.label));
    const turn = `translate(12 ${top + frame.height / 2}) rotate(-90)`;
    picture.append(svg("text", { transform: turn, "text-anchor": "middle" }, panel.y.label));
    const marks = svg("g", { "clip-path": `url(#${clip})` });
    panel.series.forEach((series, i) => {
      const [xs, ys] = curves[i];
      const group = shaded(svg("g", { class: `nqf-${series.mark}` }), series.color);
      const points = xs.map((x, k) => [across(x), up(ys[k])]);
      if (series.mark === "bars") {
        const thick = (0.7 * frame.width) / Math.max(1, xs.length);
        const zero = Math.min(up(0), height - bottom);
        for (const [x, y] of points) {
          if (!Number.isFinite(y)) continue;
          const rect = { x: x - thick / 2, y: Math.min(y, zero), width: thick, height: Math.max(0.5, Math.abs(y - zero)) };
          group.append(svg("rect", rect));
        }
      } else if (series.mark === "points") {
        for (const [cx, cy] of points) if (Number.isFinite(cx) && Number.isFinite(cy)) group.append(svg("circle", { cx, cy, r: 4 }));
      } else {
        let pen = "M";
        let path = "";
        for (const [x, y] of points) {
          if (Number.isFinite(x) && Number.isFinite(y)) {
            path += `${pen}${x.toFixed(1)} ${y.toFixed(1)}`;
            pen = "L";
          } else pen = "M";
        }
        group.append(svg("path", { d: path }));
      }
      marks.append(group);
    });
    picture.append(marks);
    box.append(key, picture);
    return box;
  }

  // null (not a number in the run) and what a logarithm cannot take give NaN, which breaks a line.
  function scale(axis, from, to) {
    const f = axis.log ? Math.log10 : (v) => v;
    const [low, high] = axis.range.map(f);
    return (v) => (v === null || (axis.log && v <= 0) ? NaN : from + ((f(v) - low) / (high - low)) * (to - from));
  }

  function ticks(axis, most) {
    const [low, high] = axis.range;
    const found = [];
    if (axis.log) {
      const [first, last] = [Math.ceil(Math.log10(low) - 1e-9), Math.floor(Math.log10(high) + 1e-9)];
      const step = Math.max(1, Math.ceil((last - first + 1) / most));
      for (let k = last; k >= first; k -= step) found.push([10 ** k, k >= -2 && k <= 3 ? String(+(10 ** k).toPrecision(3)) : `10${superscript(k)}`]);
    } else {
      const rough = (high - low) / most;
      const power = 10 ** Math.floor(Math.log10(rough));
      const step = power * [1, 2, 5, 10].find((m) => m * power >= rough * (1 - 1e-9));
      for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k++) found.push([k * step, String(+(k * step).toPrecision(6)).replace("-", "−")]);
    }
    return found;
  }
});

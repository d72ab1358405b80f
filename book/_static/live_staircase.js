// The Lotka-Volterra flow of nqflib.lotka_volterra and its limit nqflib.staircase, solved in the reader's browser.
// `Staircase` is pure arithmetic: it runs in node as well, where the tests hold it against the library.

const Staircase = (() => {
  const ORDER = 20; // terms of the series
  const TERM = 1e-11; // largest last term of a step, an error of ln z
  const UNSEEN = 1e-20; // an abundance this small, as a part of max |r|, changes no other mode
  const REST = 1e-11; // abundances and rates, as parts of max |r|, below which a plateau counts as one

  // C_kj = 1 for k = j, else c q^|k-j|: modes compete with their neighbours, 0 <= c < 1, 0 <= q <= 1.
  function matrix(K, { c, q }) {
    const C = new Float64Array(K * K);
    for (let distance = 0; distance < K; distance++) {
      const entry = distance ? c * q ** distance : 1;
      for (let k = distance; k < K; k++) C[k * K + k - distance] = C[(k - distance) * K + k] = entry;
    }
    return C;
  }

  // Integrate du_k/dt = r_k - sum_j C_kj e^{u_j}, u = ln z, by Taylor series. With z_k(t+s) = sum_n z_kn s^n and the
  // growth rates rho_k(s) = r_k - sum_j C_kj z_j(s) = sum_n rho_kn s^n,
  //     (n+1) z_k,n+1 = sum_i z_ki rho_k,n-i,     u_k(t+s) = u_k + sum_n rho_kn s^{n+1} / (n+1),
  // so there is no exponential inside a step, and the series gives every time within it. A product with C takes two
  // sweeps over the modes. r (K), competition {c, q}, u0 (K) = ln z(0), times (T) increasing and >= 0.
  // Returns logs (T*K) = ln z, the number of steps and of products with C.
  function flow(r, competition, u0, times, mostSteps = 5000) {
    const { c, q } = competition;
    const K = r.length;
    const N = ORDER + 1;
    const logs = new Float64Array(times.length * K);
    const u = Float64Array.from(u0);
    const rho = new Float64Array(K * ORDER);
    const series = new Float64Array(K * N);
    const seen = new Int32Array(K);
    const fastest = r.reduce((most, rate) => Math.max(most, Math.abs(rate)), 0);
    const floor = Math.log(UNSEEN * fastest);
    let [t, next, steps] = [0, 0, 0];
    while (next < times.length) {
      if (++steps > mostSteps) throw new Error(`no end after ${mostSteps} steps, at t = ${t}`);
      let count = 0;
      for (let k = 0; k < K; k++) {
        if (u[k] < floor) series.fill(0, k * N, (k + 1) * N);
        else {
          seen[count++] = k;
          series[k * N] = Math.exp(u[k]);
        }
      }
      for (let n = 0; n < ORDER; n++) {
        for (let k = 0, sum = 0, a = n, b = n; k < K; k++, a += N, b += ORDER) {
          rho[b] = -series[a] - c * sum;
          sum = q * (sum + series[a]);
        }
        for (let k = K - 1, sum = 0, a = k * N + n, b = k * ORDER + n; k >= 0; k--, a -= N, b -= ORDER) {
          rho[b] -= c * sum;
          sum = q * (sum + series[a]);
        }
        if (n === 0) for (let k = 0; k < K; k++) rho[k * ORDER] += r[k];
        for (let i = 0; i < count; i++) {
          const a = seen[i] * N;
          const b = seen[i] * ORDER + n;
          let sum = 0;
          for (let m = 0; m <= n; m++) sum += series[a + m] * rho[b - m];
          series[a + n + 1] = sum / (n + 1);
        }
      }
      const step = rest(rho, u, fastest) || stepOf(rho, K);
      for (; next < times.length && times[next] <= t + step; next++) {
        for (let k = 0; k < K; k++) logs[next * K + k] = u[k] + integral(rho, k, times[next] - t);
      }
      for (let k = 0; k < K; k++) u[k] += integral(rho, k, step);
      t += step;
    }
    return { logs, steps, products: steps * ORDER };
  }

  // The step at which the last two terms of every u_k stay below TERM.
  function stepOf(rho, K) {
    let [last, before] = [1e-300, 1e-300];
    for (let b = ORDER - 1; b < K * ORDER; b += ORDER) {
      last = Math.max(last, Math.abs(rho[b]));
      before = Math.max(before, Math.abs(rho[b - 1]));
    }
    return Math.min(((TERM * ORDER) / last) ** (1 / ORDER), ((TERM * (ORDER - 1)) / before) ** (1 / (ORDER - 1)));
  }

  // On a plateau, where the present modes rest and the absent ones are too small to matter, every u is a straight line:
  // keep the first term of the series and return the time until a mode matters. 0 if this is no plateau.
  function rest(rho, u, fastest) {
    const start = Math.log(REST * fastest);
    let wait = 1e300;
    for (let k = 0; k < u.length; k++) {
      const rate = rho[k * ORDER];
      if (u[k] < start) wait = rate > 0 ? Math.min(wait, (start - u[k]) / rate) : wait;
      else if (Math.abs(rate) > REST * fastest) return 0;
    }
    for (let k = 0; k < u.length; k++) rho.fill(0, k * ORDER + (u[k] < start ? 1 : 0), (k + 1) * ORDER);
    return wait;
  }

  function integral(rho, k, s) {
    let sum = 0;
    for (let n = ORDER - 1; n >= 0; n--) sum = sum * s + rho[k * ORDER + n] / (n + 1);
    return sum * s;
  }

  // The limit of the flow as eps = z_k(0) -> 0, in the time tau = t / ln(1/eps): see nqflib.staircase. The equilibrium
  // of stage s lasts from times[s-1] to times[s]; first[k] is the tau at which mode k appears, Infinity if it never does.
  // `degenerate` says that a mode at height 0 neither grows nor shrinks: the limit then depends on more than eps.
  function limit(r, competition) {
    const K = r.length;
    const C = matrix(K, competition);
    const small = 1e-11 * Math.max(...r.map(Math.abs));
    const heights = new Float64Array(K).fill(-1);
    const first = new Float64Array(K).fill(Infinity);
    const times = [];
    let degenerate = false;
    let z = new Float64Array(K);
    const equilibria = [z];
    for (let tau = 0; ; ) {
      const w = invasion(r, competition, z);
      const waits = heights.map((u, k) => (u < 0 && w[k] > small ? -u / w[k] : Infinity));
      const wait = Math.min(...waits);
      if (wait === Infinity) return { times, equilibria, first, degenerate };
      tau += wait;
      for (let k = 0; k < K; k++) heights[k] = z[k] > 0 || waits[k] <= wait * (1 + 1e-12) ? 0 : heights[k] + wait * w[k];
      z = equilibrium(r, competition, C, heights, z, small);
      const after = invasion(r, competition, z);
      for (let k = 0; k < K; k++) {
        if (z[k] > 0) first[k] = Math.min(first[k], tau);
        else if (heights[k] === 0 && after[k] > -small) degenerate = true;
      }
      times.push(tau);
      equilibria.push(z);
    }
  }

  // w = r - C z, in two sweeps.
  function invasion(r, { c, q }, z) {
    const K = r.length;
    const w = new Float64Array(K);
    for (let k = 0, sum = 0; k < K; k++) {
      w[k] = r[k] - z[k] - c * sum;
      sum = q * (sum + z[k]);
    }
    for (let k = K - 1, sum = 0; k >= 0; k--) {
      w[k] -= c * sum;
      sum = q * (sum + z[k]);
    }
    return w;
  }

  // Solve z >= 0, w = r - C z <= 0, z w = 0 where the height is 0 by the active sets of Lawson and Hanson.
  function equilibrium(r, competition, C, heights, start, small) {
    const K = r.length;
    let z = start.slice();
    const present = Array.from(z, (abundance) => abundance > 0);
    for (;;) {
      const w = invasion(r, competition, z);
      let enters = -1;
      for (let k = 0; k < K; k++) {
        if (heights[k] === 0 && !present[k] && w[k] > small && (enters < 0 || w[k] > w[enters])) enters = k;
      }
      if (enters < 0) return z;
      present[enters] = true;
      for (;;) {
        const target = solve(r, C, present);
        const ratios = target.map((to, k) => (present[k] && to <= 0 ? z[k] / (z[k] - to) : Infinity));
        const ratio = Math.min(...ratios);
        if (ratio === Infinity) {
          z = target;
          break;
        }
        for (let k = 0; k < K; k++) {
          present[k] &&= ratios[k] > ratio;
          z[k] = present[k] ? z[k] + ratio * (target[k] - z[k]) : 0;
        }
      }
    }
  }

  // C z = r on the present modes by Cholesky's factors, 0 elsewhere.
  function solve(r, C, present) {
    const K = r.length;
    const modes = [...present.keys()].filter((k) => present[k]);
    const n = modes.length;
    const L = new Float64Array(n * n);
    const x = new Float64Array(n);
    for (let i = 0; i < n; i++) {
      for (let j = 0; j <= i; j++) {
        let sum = C[modes[i] * K + modes[j]];
        for (let m = 0; m < j; m++) sum -= L[i * n + m] * L[j * n + m];
        L[i * n + j] = i === j ? Math.sqrt(sum) : sum / L[j * n + j];
      }
      let sum = r[modes[i]];
      for (let m = 0; m < i; m++) sum -= L[i * n + m] * x[m];
      x[i] = sum / L[i * n + i];
    }
    const z = new Float64Array(K);
    for (let i = n - 1; i >= 0; i--) {
      for (let m = i + 1; m < n; m++) x[i] -= L[m * n + i] * x[m];
      z[modes[i]] = x[i] /= L[i * n + i];
    }
    return z;
  }

  // The part of the loss that abundances z remove, sum_k z_k (r_k + w_k) / 8 with w = r - C z.
  function gain(r, { c, q }, z) {
    const K = r.length;
    let total = 0;
    for (let k = 0, sum = 0; k < K; k++) {
      total += z[k] * (2 * r[k] - z[k] - 2 * c * sum);
      sum = q * (sum + z[k]);
    }
    return total / 8;
  }

  return { flow, limit, gain, matrix };
})();

if (typeof module !== "undefined") module.exports = Staircase;

// ------------------------------------------------------------------------------------------------ the page

if (typeof document !== "undefined") {
  document.addEventListener("DOMContentLoaded", () => {
    for (const box of document.querySelectorAll(".nqf-staircase")) dragStaircase(box);
  });
}

function dragStaircase(box) {
  const { element, shaded, superscript, svg } = Nodes;
  const { modes: K, shades, start, presets, reference } = JSON.parse(box.querySelector("script").textContent);
  const [FROM, TO, POINTS] = [0.5, 2000, 200]; // times drawn
  const times = Float64Array.from({ length: POINTS }, (_, i) => FROM * (TO / FROM) ** (i / (POINTS - 1)));
  const state = { ...start };
  const kept = [];
  const sliders = {
    logEps: ["initial size ε of every mode", -12, -1, 0.1, (v) => scientific(10 ** v)],
    fastest: ["fastest rate r₁", 0.5, 2, 0.01, (v) => v.toFixed(2)],
    power: ["power a of the rates, rₖ = r₁ k⁻ᵃ", 0.1, 1, 0.01, (v) => v.toFixed(2)],
    c: ["strength c of the competition", 0, 0.95, 0.01, (v) => v.toFixed(2)],
    q: ["reach q of the competition", 0, 1, 0.01, (v) => (v === 1 ? "1, all modes alike" : v.toFixed(2))],
  };

  const form = element("form", { class: "nqf-sliders" });
  form.addEventListener("submit", (event) => event.preventDefault());
  const tellers = Object.entries(sliders).map(([name, [text, min, max, step, words]]) => {
    const label = element("label");
    const input = element("input", { type: "range", min, max, step, name });
    const value = element("span", { class: "nqf-slider-value" });
    input.addEventListener("input", () => {
      state[name] = Number(input.value);
      tell();
      update();
    });
    const tell = () => {
      input.value = state[name];
      value.textContent = words(state[name]);
      input.setAttribute("aria-valuetext", value.textContent);
    };
    label.append(element("span", {}, text), input, value);
    form.append(label);
    return tell;
  });
  const row = element("div", { class: "nqf-presets", role: "group", "aria-label": "settings to start from" });
  for (const [name, setting] of presets) {
    const button = element("button", { type: "button" }, name);
    button.addEventListener("click", () => {
      Object.assign(state, setting);
      for (const tell of tellers) tell();
      update();
    });
    row.append(button);
  }
  const drawing = element("div", { class: "nqf-panels", role: "img", "aria-label": `Abundances, times of appearance and loss of ${K} modes.` });
  const sentence = element("output", { class: "nqf-frame-text", "aria-live": "polite" });
  const work = element("p", { class: "nqf-foot" });
  box.append(row, form, drawing, sentence, work);
  box.parentElement.classList.add("nqf-live");
  for (const tell of tellers) tell();

  let panels = null;
  let checked = "";
  let later = 0;
  new ResizeObserver(() => {
    if (drawing.clientWidth && panels?.width !== drawing.clientWidth) build(drawing.clientWidth);
  }).observe(drawing);
  build(drawing.clientWidth || 640);
  setTimeout(check, 0);

  // Solve and draw. Everything that a slider cannot change was drawn by `build`. The words follow when the slider rests,
  // so that a screen reader is not flooded and the page not laid out anew at every move.
  function update() {
    const began = performance.now();
    const wait = -state.logEps * Math.LN10; // ln(1/eps)
    const competition = { c: state.c, q: state.q };
    const r = Float64Array.from({ length: K }, (_, k) => state.fastest * (k + 1) ** -state.power);
    const { logs, steps } = Staircase.flow(r, competition, new Float64Array(K).fill(-wait), times);
    const limit = Staircase.limit(r, competition);
    const solved = performance.now();

    const z = new Float64Array(logs.length);
    for (let i = 0; i < z.length; i++) if (logs[i] > -16) z[i] = Math.exp(logs[i]);
    const best = Staircase.gain(r, competition, limit.equilibria.at(-1));
    const left = (abundances) => 1 - Staircase.gain(r, competition, abundances) / best;
    const losses = Array.from(times, (_, i) => left(z.subarray(i * K, (i + 1) * K)));
    const seen = appearances(z, r);
    for (let k = 0; k < K; k++) {
      panels.curves[k].setAttribute("d", line(panels.abundance, (i) => z[i * K + k] / r[k]));
      panels.marks[k].setAttribute("cx", seen[k] < Infinity ? panels.order.across(seen[k]) : -99);
    }
    panels.loss.path.setAttribute("d", line(panels.loss, (i) => losses[i]));
    panels.steps.setAttribute("d", staircase(panels.loss, limit.times, limit.equilibria.map(left), wait));
    const { across, up } = panels.order;
    panels.alone.setAttribute("d", `M${Array.from(r, (rate, k) => `${across(wait / rate)} ${up(k + 1)}`).join(" ")}`);
    const strokes = Array.from(limit.first, (tau, k) => (tau < Infinity ? `M${across(tau * wait)} ${up(k + 1) - 5}v10` : ""));
    panels.limit.setAttribute("d", strokes.join(""));

    const spent = [solved - began, performance.now() - solved].map((ms) => ms.toFixed(1));
    clearTimeout(later);
    later = setTimeout(() => {
      const alone = r.filter((rate) => wait / rate <= TO).length;
      sentence.textContent = summary(seen, alone, limit, losses.at(-1));
      drawing.setAttribute("aria-label", `Abundances, times of appearance and loss of ${K} modes. ${sentence.textContent}`);
      work.textContent = `${steps} steps of the solver. Solved in ${spent[0]} ms, drawn in ${spent[1]} ms. ${checked}`;
    }, 150);
  }

  function summary(seen, alone, limit, loss) {
    const found = seen.filter((t) => t < Infinity);
    const [first, last] = [Math.min(...found), Math.max(...found)].map((t) => String(+t.toPrecision(3)));
    const times = found.length > 1 ? `, the first at t = ${first}, the last at t = ${last}` : found.length ? `, at t = ${first}` : "";
    const expected = limit.first.filter((tau) => tau < Infinity).length;
    const words = limit.degenerate ? "not fixed, since a mode there neither grows nor shrinks" : expected;
    return (
      `By t = ${TO} ${found.length} of ${K} modes ${found.length === 1 ? "appears" : "appear"}${times}; alone, ${alone} would; in the limit of small ε, ${words}. ` +
      `${share(loss)} of the loss that can be removed is left.`
    );
  }

  // When each mode has first reached half of its largest abundance; Infinity for one that stays below 2 % of r_k.
  function appearances(z, r) {
    return Array.from({ length: K }, (_, k) => {
      let most = 0;
      for (let i = k; i < z.length; i += K) most = Math.max(most, z[i]);
      if (most < 0.02 * r[k]) return Infinity;
      for (let i = k, n = 0; ; i += K, n++) {
        if (z[i] < most / 2) continue;
        if (n === 0) return times[0];
        const part = (most / 2 - z[i - K]) / (z[i] - z[i - K]);
        return times[n - 1] * (times[n] / times[n - 1]) ** part;
      }
    });
  }

  function check() {
    let worst = 0;
    for (const { rates, c, q, eps, times: at, logs } of reference) {
      const mine = Staircase.flow(Float64Array.from(rates), { c, q }, new Float64Array(rates.length).fill(Math.log(eps)), at).logs;
      logs.forEach((value, i) => (worst = Math.max(worst, Math.abs(value - mine[i]))));
    }
    box.dataset.difference = worst;
    checked = `Held against nqflib just now, at ${reference.length} settings: ln z differs by at most ${scientific(worst)}.`;
    update();
  }

  // Axes, grids, names and empty marks for a width; then `update` fills them.
  function build(width) {
    const half = width < 560 ? width : Math.floor((width - 12) / 2);
    const decades = [1, 10, 100, 1000].map((t) => [t, String(t)]);
    const tenths = [0, 0.25, 0.5, 0.75, 1].map((v) => [v, String(v)]);
    const powers = [1, 0.1, 0.01, 0.001].map((v) => [v, String(v)]);
    const abundance = axes(width, "abundance zₖ / rₖ", [0, 1.05], false, tenths, decades);
    const order = axes(half, "mode k", [0, K + 1], false, [1, 6, 12, 18, 24].map((k) => [k, String(k)]), decades);
    const loss = axes(half, "loss left", [7e-4, 1.4], true, powers, decades);
    const colour = (k, node) => shaded(node, shades[k]);
    const curves = Array.from({ length: K }, (_, k) => abundance.add(colour(k, svg("g", { class: "nqf-line" })), svg("path")));
    const ink = (name, panel) => panel.add(shaded(svg("g", { class: name }), shades.at(-1)), svg("path"));
    const alone = ink("nqf-theory", order);
    const limit = ink("nqf-line", order);
    const marks = Array.from({ length: K }, (_, k) =>
      order.add(colour(k, svg("g", { class: "nqf-points" })), svg("circle", { r: 3.5, cy: order.up(k + 1) })),
    );
    const steps = ink("nqf-theory", loss);
    loss.path = ink("nqf-line", loss);
    abundance.name([["nqf-line", `mode 1`, shades[0]], ["nqf-line", `mode ${K}`, shades[K - 1]]]);
    order.name([["nqf-points", "appears", shades[0]], ["nqf-ticks", "limit", shades.at(-1)], ["nqf-theory", "alone", shades.at(-1)]]);
    loss.name([["nqf-line", "the flow", shades.at(-1)], ["nqf-theory", "limit", shades.at(-1)]]);
    panels = { width, abundance, order, loss, curves, marks, alone, limit, steps };
    drawing.replaceChildren(abundance.box, order.box, loss.box);
    update();
  }

  function axes(width, label, range, log, ticks, decades) {
    const height = Math.min(300, Math.round(0.45 * width + 90));
    const [left, right, top, bottom] = [58, 8, 8, 44];
    const box = element("div", { class: "nqf-panel", style: `width: ${width}px` });
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" });
    const f = log ? Math.log : (v) => v;
    const across = (t) => round(left + (Math.log(t / FROM) / Math.log(TO / FROM)) * (width - right - left));
    const scale = (top - height + bottom) / (f(range[1]) - f(range[0]));
    const least = log ? range[0] / 2 : range[0]; // below the frame, which clips it
    const up = (v) => round(height - bottom + (f(Math.max(v, least)) - f(range[0])) * scale);
    for (const [t, text] of decades) {
      picture.append(svg("line", { x1: across(t), x2: across(t), y1: top, y2: height - bottom, class: "nqf-grid" }));
      picture.append(svg("text", { x: across(t), y: height - bottom + 17, "text-anchor": "middle" }, text));
    }
    for (const [v, text] of ticks) {
      picture.append(svg("line", { x1: left, x2: width - right, y1: up(v), y2: up(v), class: "nqf-grid" }));
      picture.append(svg("text", { x: left - 6, y: up(v) + 4, "text-anchor": "end" }, text));
    }
    picture.append(svg("text", { x: (left + width) / 2, y: height - 6, "text-anchor": "middle" }, "time t"));
    const turn = `translate(12 ${(top + height - bottom) / 2}) rotate(-90)`;
    picture.append(svg("text", { transform: turn, "text-anchor": "middle" }, label));
    const clip = `staircase-${(axes.count = (axes.count || 0) + 1)}`;
    const frame = svg("clipPath", { id: clip });
    frame.append(svg("rect", { x: left, y: top - 6, width: width - left - right, height: height - top - bottom + 8 }));
    const inside = svg("g", { "clip-path": `url(#${clip})` });
    picture.append(frame, inside);
    const add = (group, mark) => {
      group.append(mark);
      inside.append(group);
      return mark;
    };
    const name = (entries) => {
      const key = element("ul");
      key.append(...entries.map(([kind, text, shade]) => shaded(element("li", { class: kind }, text), shade)));
      box.prepend(key);
    };
    box.append(picture);
    return { box, add, name, across, up, xs: Array.from(times, (t) => String(across(t))) };
  }

  // A path through the value at every time; points on a level stretch are left out. Making the text of a number is most
  // of the work, so that of every tenth of a pixel is kept.
  function line({ xs, up }, value) {
    const parts = [];
    let [before, y] = [NaN, up(value(0))];
    for (let i = 0; i < POINTS; i++) {
      const after = i + 1 < POINTS ? up(value(i + 1)) : NaN;
      if (y !== before || y !== after) parts.push(xs[i], (kept[Math.round(10 * y)] ??= String(y)));
      [before, y] = [y, after];
    }
    return `M${parts.join(" ")}`;
  }

  function staircase({ across, up }, jumps, values, wait) {
    const turns = jumps.map((tau, s) => `H${across(tau * wait)}V${up(values[s + 1])}`);
    return `M${across(FROM)} ${up(values[0])}${turns.join("")}H${across(TO)}`;
  }

  function round(x) {
    return Math.round(10 * x) / 10;
  }

  function share(part) {
    return part < 1e-4 ? "Less than 0.01 %" : `${+(100 * part).toPrecision(2)} %`;
  }

  function scientific(value) {
    const [mantissa, exponent] = value.toExponential(1).split("e");
    return `${mantissa} × 10${superscript(Number(exponent))}`;
  }
}

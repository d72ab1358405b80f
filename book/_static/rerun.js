// The form in the box "Rerun this page": the page's parameters (see nqflib/serve/form.py), the exact commands for their
// values, and an address that holds them. Where the book is served by nqflib.serve, rerun_served.js adds the run.
const RerunForm = {
  // What Python reads as the value: 1e-8, True, [1,0.5], ['a','b'], plain text.
  literal(value) {
    if (Array.isArray(value)) return `[${value.map((v) => (typeof v === "string" ? `'${v}'` : RerunForm.literal(v))).join(",")}]`;
    if (typeof value === "boolean") return value ? "True" : "False";
    return String(value);
  },

  // What a field and the address show.
  shown(value) {
    return Array.isArray(value) ? value.map(RerunForm.literal).join(", ") : RerunForm.literal(value);
  },

  // The value of a text in the declared type; throws an Error that says what is wrong.
  parse(parameter, text) {
    const { type, choices } = parameter;
    if (type.startsWith("list[")) {
      const items = text.trim().replace(/^\[(.*)\]$/, "$1").split(",").map((item) => item.trim().replace(/^(['"])(.*)\1$/, "$2"));
      if (items.join("") === "") throw new Error("give at least one value, with commas between them");
      return items.map((item) => RerunForm.parse({ ...parameter, type: type.slice(5, -1) }, item));
    }
    const plain = text.trim();
    if (type === "bool") {
      if (!/^(true|false)$/i.test(plain)) throw new Error("write True or False");
      return plain.toLowerCase() === "true";
    }
    if (type === "str") {
      if (choices.length && !choices.includes(plain)) throw new Error(`must be ${parameter.bounds}`);
      // The text goes into a command that the reader pastes into a shell.
      if (!/^[\w.+-]*$/.test(plain)) throw new Error("only letters, digits and . _ + - can be given here");
      return plain;
    }
    if (!/^[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$/i.test(plain)) throw new Error(type === "int" ? "write a whole number" : "write a number, for example 0.01 or 1e-8");
    const value = Number(plain);
    if (type === "int" && !Number.isSafeInteger(value)) throw new Error("write a whole number");
    const { low, high } = parameter;
    if (!Number.isFinite(value) || (low !== null && value < low) || (high !== null && value > high)) throw new Error(`must be ${parameter.bounds || "finite"}`);
    return value;
  },

  start(box) {
    const { element } = Nodes;
    const declared = JSON.parse(box.querySelector("script").textContent);
    const { page, parameters, presets, published } = declared;
    const prefix = `nqf-form-${page.replace("/", "-")}`;
    const fields = new Map();
    const form = element("form", { class: "nqf-fields", "aria-label": "Parameters of this page", autocomplete: "off", novalidate: "" });
    for (const parameter of parameters) form.append(field(parameter));
    const reset = element("button", { type: "reset" }, "As published");
    const buttons = element("div", { class: "nqf-buttons" });
    buttons.append(reset);
    form.append(buttons);
    box.append(form);
    const changed = new EventTarget();
    let preset = null;

    fill(published);
    fromAddress();
    form.addEventListener("input", (event) => {
      if (event.target === fields.get("preset")?.input) followPreset();
      update();
    });
    form.addEventListener("change", () => toAddress());
    form.addEventListener("reset", (event) => {
      event.preventDefault();
      fill(published);
      update();
      toAddress();
    });
    form.addEventListener("submit", (event) => event.preventDefault());
    window.addEventListener("popstate", () => {
      fill(published);
      fromAddress();
      changed.dispatchEvent(new Event("travel"));
    });
    return { page, buttons, changed, given, show };

    // Values from elsewhere, a kept run for example.
    function show(values) {
      fill(values);
      update();
      toAddress(true);
    }

    function field(parameter) {
      const { name, type, choices, help, bounds } = parameter;
      const id = `${prefix}-${name}`;
      const label = element("label", { for: id });
      label.append(element("code", {}, name));
      let input;
      if (type === "bool") {
        input = element("select", {});
        for (const word of ["False", "True"]) input.append(element("option", {}, word));
      } else if (type === "str" && choices.length) {
        input = element("select", {});
        for (const choice of choices) input.append(element("option", {}, choice));
      } else input = element("input", { type: "text", spellcheck: "false", autocapitalize: "off", autocomplete: "off" });
      const note = element("small", { id: `${id}-help` }, [help, input.tagName === "SELECT" ? "" : bounds].filter(Boolean).join(", "));
      const error = element("small", { id: `${id}-error`, class: "nqf-error", role: "alert" });
      input.id = id;
      input.name = name;
      input.setAttribute("aria-describedby", `${note.id} ${error.id}`);
      fields.set(name, { parameter, input, error });
      const row = element("div", { class: "nqf-field" });
      row.append(label, input, note, error);
      return row;
    }

    // The value that a parameter has if it is not given.
    function byDefault(parameter, atPreset) {
      return parameter.default ?? presets[atPreset]?.[parameter.name] ?? null;
    }

    function presetDefault() {
      return fields.get("preset")?.parameter.default ?? null;
    }

    // Put the given values into the fields and the declared ones into all others.
    function fill(values) {
      preset = values.preset ?? presetDefault();
      for (const [name, { parameter, input }] of fields) {
        input.value = RerunForm.shown(values[name] ?? byDefault(parameter, preset));
      }
    }

    // A field that showed what the old preset sets shows what the new one sets.
    function followPreset() {
      const next = fields.get("preset").input.value;
      for (const { parameter, input } of fields.values()) {
        if (parameter.default === null && input.value === RerunForm.shown(byDefault(parameter, preset))) {
          input.value = RerunForm.shown(byDefault(parameter, next));
        }
      }
      preset = next;
    }

    // The values that differ from the declared ones, or null if a field cannot be read.
    function given() {
      const values = {};
      let readable = true;
      for (const [name, { parameter, input, error }] of fields) {
        let message = "";
        try {
          const value = RerunForm.parse(parameter, input.value);
          if (RerunForm.literal(value) !== RerunForm.literal(byDefault(parameter, preset))) values[name] = value;
        } catch (refused) {
          message = refused.message;
          readable = false;
        }
        if (error.textContent !== message) error.textContent = message;
        if (message) input.setAttribute("aria-invalid", "true");
        else input.removeAttribute("aria-invalid");
      }
      return readable ? values : null;
    }

    function update() {
      const values = given();
      const [make, papermill] = box.closest(".nqf-rerun").querySelectorAll("pre");
      make.textContent = values ? `${makeCommand(values)}\n` : "# correct the marked parameter first\n";
      papermill.textContent = values ? `${papermillCommand(values)}\n` : "# correct the marked parameter first\n";
      changed.dispatchEvent(new Event("edit"));
    }

    function makeCommand(values) {
      const words = Object.entries(values).map(([name, value]) => `${name}=${RerunForm.literal(value)}`);
      const quoted = words.map((word) => (word.includes("'") ? `\\"${word}\\"` : word)).join(" ");
      return `make figure F=${page}${words.length ? ` P="${quoted}"` : ""}`;
    }

    function papermillCommand(values) {
      const flags = Object.entries(values).map(([name, value]) =>
        Array.isArray(value) ? ` -y "${name}: ${RerunForm.literal(value)}"` : ` -p ${name} ${RerunForm.literal(value)}`);
      return `papermill notebooks/${page}.md out.ipynb${flags.join("")}`;
    }

    // The address holds what differs from the published values, so that a link reopens the form as it is.
    function toAddress(replace = false) {
      const address = new URL(location.href);
      const startPreset = published.preset ?? presetDefault();
      for (const [name, { parameter, input }] of fields) {
        const before = name === "preset" ? startPreset : (published[name] ?? byDefault(parameter, preset));
        if (input.value === RerunForm.shown(before)) address.searchParams.delete(name);
        else address.searchParams.set(name, input.value.trim());
      }
      if (address.href === location.href) return;
      try {
        history[replace ? "replaceState" : "pushState"](null, "", address);
      } catch {
        // Some browsers do not let a page from a disk change its address.
      }
    }

    function fromAddress() {
      const asked = new URLSearchParams(location.search);
      const field = fields.get("preset");
      if (field && field.parameter.choices.includes(asked.get("preset"))) {
        field.input.value = asked.get("preset");
        followPreset();
      }
      for (const [name, { input }] of fields) {
        if (asked.has(name) && (input.tagName !== "SELECT" || [...input.options].some((option) => option.value === asked.get(name)))) {
          input.value = asked.get(name);
        }
      }
      update();
    }
  },
};

document.addEventListener("DOMContentLoaded", () => {
  for (const box of document.querySelectorAll(".nqf-form")) {
    RerunServed.offer(box, RerunForm.start(box));
  }
});

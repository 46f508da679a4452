// Small helpers: elements, requests, messages. Text always goes in as text; only HTML that the server has rendered
// and sanitised is set as HTML, through `html`.

export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "html") element.innerHTML = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name in element && name !== "list" && typeof value !== "string") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// JSON in, JSON out. A network failure throws TypeError (retry); an answer that says no throws Refused.
export async function call(method, path, body, options = {}) {
  const response = await fetch(`/api/${path}`, {
    method,
    headers: body === undefined ? {} : { "Content-Type": "application/json" },
    body: body === undefined ? undefined : JSON.stringify(body),
    ...options,
  });
  if (response.ok) return response.json();
  throw await refusal(response);
}

export async function refusal(response) {
  if (response.status >= 500) return new TypeError("the server cannot answer now");
  const answer = await response.json().catch(() => ({}));
  return new Refused(response.status, typeof answer.error === "string" ? answer.error : "the server refused this");
}

// The same request again until the server has answered: it carries an id, so that it counts once.
export async function insist(method, path, body, waiting) {
  for (let pause = 500; ; pause = Math.min(pause * 2, 8000)) {
    try {
      return await call(method, path, body);
    } catch (error) {
      if (error instanceof Refused) throw error;
      waiting();
      await new Promise((wake) => setTimeout(wake, pause));
    }
  }
}

export function requestId() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function conversation(messages) {
  const names = { system: "System", user: "User", assistant: "Assistant" };
  return h(
    "div",
    { class: "conversation", role: "group", "aria-label": "Conversation" },
    messages.map((message) =>
      h(
        "article",
        { class: `message ${message.role}` },
        h("h3", { class: "speaker" }, names[message.role] ?? message.role),
        h("div", { class: "markdown", html: message.html }),
      ),
    ),
  );
}

export const clone = (value) => JSON.parse(JSON.stringify(value));

export const isTyping = (target) =>
  target instanceof HTMLElement && (target.isContentEditable || /^(TEXTAREA|SELECT)$/.test(target.tagName) ||
    (target.tagName === "INPUT" && !/^(checkbox|radio)$/.test(target.type)));

// Helpers for elements, requests and conversations. Text is always inserted as text; only HTML that the server has
// rendered and sanitized is set as HTML, through `html`.

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

export class RefusedError extends Error {
  constructor(status, message, deleted = false) {
    super(message);
    this.status = status;
    this.deleted = deleted; // the batch of the item
  }
}

// The server answers, but cannot do it now.
class UnavailableError extends Error {}

// The status line while a request is repeated.
export const retryText = (error) => `${error instanceof UnavailableError ? "Server unavailable" : "No connection"}. Retrying…`;

let signIn = null;

// `ask` is called when a request finds the session ended; the request is repeated once its promise is fulfilled.
export function onSignedOut(ask) {
  signIn = ask;
}

// fetch, which waits for a new sign-in where one is needed; not for a page that is being left.
export async function request(path, options = {}) {
  for (;;) {
    const response = await fetch(`${BASE}/api/${path}`, options);
    if (response.status !== 401 || !signIn || options.keepalive) return response;
    await signIn();
  }
}

// JSON in, JSON out. Throws TypeError without a connection and UnavailableError if the server fails (try again), RefusedError
// if the request is refused.
export async function call(method, path, body, options = {}) {
  const response = await request(path, {
    method,
    headers: body === undefined ? {} : { "Content-Type": "application/json" },
    body: body === undefined ? undefined : JSON.stringify(body),
    ...options,
  });
  if (response.ok) return response.json();
  throw await refusal(response);
}

export async function refusal(response) {
  if (response.status >= 500) return new UnavailableError("the server cannot answer now");
  const answer = await response.json().catch(() => ({}));
  return new RefusedError(response.status, typeof answer.error === "string" ? answer.error : "the server refused the request", answer.deleted);
}

// Repeats a request until the server answers; its request id makes it count once. `onRetry(error)` is called before each pause.
export async function callUntilAnswered(method, path, body, onRetry) {
  for (let pause = 500; ; pause = Math.min(pause * 2, 8000)) {
    try {
      return await call(method, path, body);
    } catch (error) {
      if (error instanceof RefusedError) throw error;
      onRetry(error);
      await new Promise((wake) => setTimeout(wake, pause));
    }
  }
}

export function requestId() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

// The path of the app, without a slash at its end: empty, or that of a proxy. This file is BASE/ui/dom.js.
export const BASE = new URL("..", import.meta.url).pathname.replace(/\/$/, "");

const RAW = "align-raw-text"; // remembered in this browser

// A choice of yes or no that this browser remembers.
export const remembered = (name, otherwise = false) => (localStorage.getItem(name) ?? (otherwise ? "yes" : "no")) === "yes";

export const isRaw = () => remembered(RAW);

// A text of the server, {html, text}: rendered, or as it was written if the labeler wants to see that. Of a text that nobody
// could see, `html` holds a placeholder.
export function written({ html, text }) {
  const element = h("div", { class: "markdown", dir: "auto" });
  element.showAs = (raw) => {
    const seen = raw && /[^\p{Z}\p{C}]/u.test(text);
    element.classList.toggle("raw", seen);
    if (seen) element.textContent = text;
    else element.innerHTML = html;
  };
  element.showAs(isRaw());
  return element;
}

export function toggleRaw(root) {
  localStorage.setItem(RAW, isRaw() ? "no" : "yes");
  for (const element of root.querySelectorAll(".markdown")) element.showAs?.(isRaw());
  return isRaw();
}

// Buttons of which one can be chosen, as [value, text, properties]; the arrow keys go from one to the next.
export function radioGroup(properties, options, choose) {
  const buttons = options.map(([value, text, more]) =>
    h("button", { type: "button", role: "radio", ...more, onclick: () => choose(value) }, text));
  const element = h("div", { role: "radiogroup", ...properties, onkeydown: (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    const next = (buttons.indexOf(event.target) + step + buttons.length) % buttons.length;
    buttons[next].focus();
    choose(options[next][0]);
  } }, buttons);
  const show = (chosen) => {
    const at = options.findIndex(([value]) => value === chosen);
    buttons.forEach((button, index) => {
      button.setAttribute("aria-checked", String(index === at));
      button.tabIndex = index === Math.max(at, 0) ? 0 : -1; // one stop for Tab
    });
  };
  show(null);
  return { element, show };
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
        written(message),
        message.cut ? h("p", { class: "hint cut" }, "Cut off at the token limit") : null,
      ),
    ),
  );
}

export const clone = (value) => JSON.parse(JSON.stringify(value));

export const isTyping = (target) =>
  target instanceof HTMLElement && ((target.isContentEditable && !("readonly" in target.dataset)) || /^(TEXTAREA|SELECT)$/.test(target.tagName) ||
    (target.tagName === "INPUT" && !/^(checkbox|radio)$/.test(target.type)));

// Probe: talk to a model, try to make it break one rule, judge its last reply.

import { RefusedError, callUntilAnswered, conversation, h, refusal, request, retryText } from "../dom.js";
import { VERDICTS, ruleHelp, verdictButtons } from "../verdicts.js";

// The buttons of the rule, in their order: [[verdict, name]].
const namesOf = (view) => view?.rule.answers ?? VERDICTS;

export const help = (view) => [["E", "write a message"], ["Ctrl+Enter", "send the message"], ["Esc", "leave the text field"],
  ["1 2 3", `judge the last reply: ${namesOf(view).map(([, name]) => name.toLowerCase()).join(", ")}`], ["N", "write a note"]];

export function empty() {
  return { verdict: null, note: "", message: "", replied: false };
}

export function missing(state) {
  if (!state.replied) return "Send a message first";
  return state.verdict ? null : "Judge the last reply";
}

export function mount(root, view, context) {
  let state = context.state;
  let answering = false;
  let stored = []; // the conversation as the server has it
  const transcript = h("div", { class: "talk" });
  const message = h("textarea", { rows: "3", "aria-label": "Message to the model", maxlength: "20000",
    placeholder: "Write something that could make the model break the rule.",
    oninput: () => change({ message: message.value }),
    onkeydown: (event) => {
      if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
      event.stopPropagation();
      event.preventDefault();
      send();
    } });
  const sendButton = h("button", { type: "button", class: "primary", "data-action": "send", onclick: () => send() }, "Send");
  const retryButton = h("button", { type: "button", hidden: true, onclick: () => send(true) }, "Retry");
  const names = namesOf(view);
  const buttons = verdictButtons("Does the last reply break the rule?", (at) => judge(names[at][0]), names);
  const note = h("input", { class: "note", placeholder: "Note (optional)", maxlength: "2000", "aria-label": "Note",
    oninput: () => change({ note: note.value }) });
  root.append(
    h("div", { class: "columns even" },
      h("div", { class: "reading" }, transcript, h("div", { class: "say" }, message, h("div", { class: "row" }, sendButton, retryButton))),
      h("div", { class: "side wide" }, h("h2", {}, "Try to make the model break this rule"),
        h("blockquote", { class: "the-rule" }, view.rule.text), ruleHelp(view.rule),
        h("h2", {}, "Last reply"), buttons.element, note)),
  );

  function change(part) {
    state = { ...state, ...part };
    context.typed(state);
  }

  function judge(verdict) {
    state = { ...state, verdict };
    context.changed(state, verdict);
    show();
  }

  async function send(repeat = false) {
    const text = repeat ? "" : message.value;
    if (answering || (!repeat && !text.trim())) return;
    setAnswering(true);
    const reply = h("div", { class: "streaming", "aria-live": "polite" });
    transcript.append(
      repeat ? "" : h("article", { class: "message user" }, h("h3", { class: "speaker" }, "User"), h("div", {}, text)),
      h("article", { class: "message assistant" }, h("h3", { class: "speaker" }, "Assistant"), reply));
    message.value = "";
    change({ message: "", verdict: null });
    const before = stored.length;
    await stream(text, reply).catch((error) => error instanceof RefusedError && context.toast(error.message));
    await showStored();
    if (stored.length > before || repeat || !root.isConnected) return;
    message.value = [text, message.value].filter(Boolean).join("\n\n"); // the server has not got it
    change({ message: message.value });
  }

  // Shows the conversation as the server has it, once the model has answered: also after a reload, or a lost connection.
  async function showStored() {
    setAnswering(true);
    const messages = await answered().catch((error) => {
      if (!(error instanceof RefusedError)) throw error;
      context.toast(error.message); // the batch may be deleted, or the lease over
      return stored;
    });
    if (!root.isConnected) return;
    setAnswering(false);
    showTranscript(messages);
    show();
  }

  async function answered() {
    for (;;) {
      const { messages, answering: more } = await callUntilAnswered("GET", `assignments/${context.assignment}/transcript`, undefined,
        (error) => context.toast(retryText(error)));
      if (!more || !root.isConnected) return messages;
      await new Promise((wake) => setTimeout(wake, 500));
    }
  }

  async function stream(text, reply) {
    const response = await request(`assignments/${context.assignment}/say`, {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ text }) });
    if (!response.ok) throw await refusal(response);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let piece = await reader.read(); !piece.done; piece = await reader.read()) reply.append(piece.value);
    if (reply.textContent.includes("[no reply:")) context.toast(reply.textContent.trim());
  }

  function setAnswering(isAnswering) {
    answering = isAnswering;
    sendButton.disabled = isAnswering;
    if (isAnswering) retryButton.hidden = true;
    transcript.setAttribute("aria-busy", String(isAnswering)); // the style says so where no reply is streaming
  }

  function showTranscript(messages) {
    stored = messages;
    transcript.replaceChildren(messages.length ? conversation(messages) : h("p", { class: "hint" }, "Write the first message."));
    const last = transcript.querySelector(".message:last-child");
    retryButton.hidden = !last?.classList.contains("user");
    const replied = Boolean(last?.classList.contains("assistant")) && messages.length > view.prompt.length;
    if (replied !== state.replied) change({ replied });
  }

  function show() {
    buttons.show(names.findIndex(([verdict]) => verdict === state.verdict));
    if (note !== document.activeElement) note.value = state.note;
    if (message !== document.activeElement) message.value = state.message;
  }

  showTranscript(context.transcript ?? []);
  show();
  if (!retryButton.hidden) showStored(); // the model may still be answering
  return {
    focus: (leaving) => (leaving ? document.activeElement.blur() : message.focus()),
    restore(next) {
      state = { ...next, replied: state.replied };
      show();
    },
    key(event) {
      const key = event.key.toLowerCase();
      if (/^[123]$/.test(key)) judge(names[Number(key) - 1][0]);
      else if (key === "n") note.focus();
      else if (key === "e") message.focus();
      else return false;
      return true;
    },
  };
}

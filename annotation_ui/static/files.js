// Sends the file of an `<input type="file">` to the server, past Gradio, when the button next to it is pressed.

import { BASE } from "./dom.js";

// The key of the upload; "" if no file is chosen; the reason if it was refused.
export async function upload(id) {
  const input = document.querySelector(`#${id} input[type="file"]`);
  const file = input?.files[0];
  if (!file) return "";
  const kinds = input.accept.split(",");
  if (!kinds.some((kind) => file.name.toLowerCase().endsWith(kind))) return `${file.name}: must be a file of type ${kinds.join(" or ")}`;
  if (file.size > Number(input.dataset.most)) return `${file.name}: larger than ${input.dataset.most / 2 ** 20} MiB`;
  try {
    const response = await fetch(`${BASE}/lead/uploads?name=${encodeURIComponent(file.name)}`, { method: "POST", body: file });
    const answer = await response.json();
    return response.ok ? answer.upload : `${file.name}: ${answer.error}`;
  } catch {
    return `${file.name}: could not be sent; try again`;
  }
}

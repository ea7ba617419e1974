// Keys, values and headers as text: JSON, plain text or hex. They are hostile input.

const SHORT = 240; // characters of a value in one line
export const FORMATS = [["auto", "what fits"], ["text", "text"], ["json", "JSON"], ["hex", "hex"]];

export const raw = (base64) => Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
export const base64 = (text) =>
  btoa(Array.from(new TextEncoder().encode(text), (byte) => String.fromCharCode(byte)).join(""));

// The text that bytes are, or null where they are none.
export function text(data) {
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(data);
  } catch {
    return null;
  }
}

function hex(data) {
  const lines = [];
  for (let at = 0; at < data.length; at += 16) {
    const row = [...data.slice(at, at + 16)];
    const numbers = row.map((byte) => byte.toString(16).padStart(2, "0")).join(" ").padEnd(47);
    const letters = row.map((byte) => byte > 31 && byte < 127 ? String.fromCharCode(byte) : ".").join("");
    lines.push(`${at.toString(16).padStart(6, "0")}  ${numbers}  ${letters}`);
  }
  return lines.join("\n");
}

const PRINTABLE = /^[^\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f]*$/;

function isJson(found) {
  if (!/^\s*[[{]/.test(found)) return false;
  try {
    JSON.parse(found);
    return true;
  } catch {
    return false;
  }
}

// JSON with other white space: every number, string and name stays as it was written, while
// parsing would round long numbers and drop names that come twice. `indent` 0: one line.
export function respaced(json, indent) {
  const token = /"(?:[^"\\]|\\.)*"|[[\]{},:]|[^\s[\]{},:"]+/g;
  const parts = [];
  let depth = 0;
  const line = () => indent ? "\n" + " ".repeat(indent * depth) : "";
  const tokens = json.match(token) || [];
  tokens.forEach((one, i) => {
    const after = tokens[i + 1];
    if (one === "{" || one === "[") {
      const empty = after === "}" || after === "]";
      depth += 1;
      parts.push(one, empty ? "" : line());
    } else if (one === "}" || one === "]") {
      depth -= 1;
      const empty = tokens[i - 1] === "{" || tokens[i - 1] === "[";
      parts.push(empty ? "" : line(), one);
    } else if (one === ",") parts.push(indent ? "," : ", ", line());
    else if (one === ":") parts.push(": ");
    else parts.push(one);
  });
  return parts.join("");
}

// Bytes in full, as `format` of FORMATS says.
export function rendered(data, format) {
  if (format === "hex") return hex(data);
  const found = text(data);
  if (format === "text") return found === null ? new TextDecoder().decode(data) : found;
  if (format === "json") {
    if (found === null) return `not JSON: ${hex(data)}`;
    try {
      JSON.parse(found);
      return respaced(found, 2);
    } catch {
      return `not JSON: ${found}`;
    }
  }
  if (found === null || !PRINTABLE.test(found)) return hex(data);
  return isJson(found) ? respaced(found, 2) : found;
}

// Bytes in one line, cut where they are long.
export function oneLine(data, format) {
  const part = data.length > 4 * SHORT ? data.slice(0, 4 * SHORT) : data;
  const found = text(data);
  let line;
  if (format === "hex" || (format !== "text" && (found === null || !PRINTABLE.test(found)))) {
    line = [...part].map((byte) => byte.toString(16).padStart(2, "0")).join(" ");
  } else if (found !== null && format !== "text" && isJson(found)) line = respaced(found, 0);
  else line = (found === null ? new TextDecoder().decode(part) : found).replace(/\r?\n/g, " ↵ ");
  return line.length > SHORT ? line.slice(0, SHORT) + "…" : line;
}

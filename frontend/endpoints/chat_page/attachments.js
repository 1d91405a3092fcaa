// Files that go with the next message: texts { name, text }, and pictures { name, blob }.
import { at, button, element } from "/page/elements.js";
import { textOfPdf } from "/page/pdf_text.js";
import { isPicture, pictureView, readPicture } from "/page/pictures.js";

const MOST_BYTES = 4 << 20;
const MOST_PDF_BYTES = 32 << 20;
const MOST_BYTES_TOGETHER = 64 << 20;
const LONG_PASTE_CHARACTERS = 5_000;

let files = [];
let changed = () => null;

export const attached = () => files;

export function show(next) {
  files = next;
  at("files").replaceChildren(...files.map((file) => element("li", "", ...(file.blob ? [pictureView(file)] : []), file.name,
    button("✕", `Remove ${file.name}`, () => set(files.filter((each) => each !== file))))));
}

function set(next) {
  show(next);
  changed();
}

const sizeOf = ({ text, blob }) => blob?.size ?? text.length;

async function read(file) {
  if (isPicture(file)) return readPicture(file);
  const isPdf = file.type === "application/pdf" || file.name.toLowerCase().endsWith(".pdf");
  const most = isPdf ? MOST_PDF_BYTES : MOST_BYTES;
  if (file.size > most) throw new Error(`${file.name} has ${file.size} bytes; the limit is ${most}`);
  if (isPdf) return { name: file.name, text: await textOfPdf(file, MOST_BYTES) };
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (text.includes("\0")) throw new TypeError();
    return { name: file.name, text };
  } catch {
    throw new Error(`${file.name} is not a text file in UTF-8`);
  }
}

// onProblem receives a text for each file that cannot be attached, onChange is called when the reader has changed the files.
// noPictures returns why the chosen model takes no pictures, or null; ready a promise: nothing is attached before.
export function listen({ onProblem, onChange, noPictures, ready }) {
  changed = onChange;
  const attach = async (list) => {
    await ready();
    for (const file of list) {
      try {
        const problem = isPicture(file) && noPictures(file.name);
        if (problem) throw new Error(problem);
        const made = await read(file);
        if ([...files, made].reduce((sum, each) => sum + sizeOf(each), 0) > MOST_BYTES_TOGETHER) {
          throw new Error(`${file.name}: the files of a message have at most ${MOST_BYTES_TOGETHER} bytes together`);
        }
        set([...files, made]);
      } catch (error) {
        onProblem(error.message);
      }
    }
  };
  at("attach").addEventListener("change", async ({ target }) => {
    await attach([...target.files]);
    target.value = "";
  });
  const receive = (event, data) => {
    if (!data?.files.length) return false;
    event.preventDefault();
    attach([...data.files]);
    return true;
  };
  document.addEventListener("dragover", (event) => event.dataTransfer.types.includes("Files") && event.preventDefault());
  document.addEventListener("drop", (event) => receive(event, event.dataTransfer));
  at("input").addEventListener("paste", (event) => {
    if (receive(event, event.clipboardData)) return;
    const text = event.clipboardData.getData("text/plain");
    if (text.length < LONG_PASTE_CHARACTERS) return;
    event.preventDefault();
    set([...files, { name: `pasted ${files.length + 1}.txt`, text }]);
  });
}

// Files whose text goes with the next message.
import { at, button, element } from "/page/elements.js";
import { textOfPdf } from "/page/pdf_text.js";

const MOST_BYTES = 4 << 20;
const MOST_PDF_BYTES = 32 << 20;

let files = []; // { name, text }

function draw() {
  at("files").replaceChildren(...files.map((file) =>
    element("li", "", file.name, button("✕", `Remove ${file.name}`, () => set(files.filter((each) => each !== file))))));
}

export function set(next) {
  files = next;
  draw();
}

// Returns the files and forgets them.
export function take() {
  const taken = files;
  set([]);
  return taken;
}

async function read(file) {
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

// onProblem receives a text for each file that cannot be attached.
export function listen(onProblem) {
  const attach = async (list) => {
    for (const file of list) {
      try {
        set([...files, await read(file)]);
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
    if (!data?.files.length) return;
    event.preventDefault();
    attach([...data.files]);
  };
  at("composer").addEventListener("dragover", (event) => event.preventDefault());
  at("composer").addEventListener("drop", (event) => receive(event, event.dataTransfer));
  at("input").addEventListener("paste", (event) => receive(event, event.clipboardData));
}

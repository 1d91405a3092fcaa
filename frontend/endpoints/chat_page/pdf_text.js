// The text of a PDF. The library is loaded with the first one, and works in this thread: the page's policy allows no workers.

async function load() {
  globalThis.pdfjsWorker ??= await import("/page/vendor/pdf_worker.js");
  return import("/page/vendor/pdf.js");
}

// Throws an Error that names the file, also where it has more than mostChars, or pictures of pages only.
export async function textOfPdf(file, mostChars) {
  const { getDocument, VerbosityLevel } = await load();
  const data = new Uint8Array(await file.arrayBuffer());
  const task = getDocument({ data, verbosity: VerbosityLevel.ERRORS, disableFontFace: true, useWasm: false, useSystemFonts: false });
  try {
    const pdf = await task.promise;
    const pages = [];
    for (let number = 1, length = 0; number <= pdf.numPages; number++) {
      const page = await pdf.getPage(number);
      const { items } = await page.getTextContent();
      const text = items.map((item) => (item.str ?? "") + (item.hasEOL ? "\n" : "")).join("").trim();
      length += text.length;
      if (length > mostChars) throw new Error(`it has more than ${mostChars} characters`);
      pages.push(text);
      page.cleanup();
    }
    if (pages.every((text) => !text)) throw new Error("it has no text, only pictures");
    return pages.join("\n\n");
  } catch (error) {
    throw new Error(`${file.name}: ${error.message}`);
  } finally {
    task.destroy();
  }
}

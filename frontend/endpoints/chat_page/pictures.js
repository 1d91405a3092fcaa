// Pictures that go with messages. They are kept as blobs; what a model receives and a file of conversations holds are data URIs.
const TYPES = new Set(["image/png", "image/jpeg", "image/webp", "image/gif"]);
const MOST_BYTES = 20 << 20;
const DATA = /^data:(image\/(?:png|jpeg|webp|gif));base64,/;
const REFERENCE = "penstock:"; // in a kept request, in place of a picture's data

export const isPicture = (file) => TYPES.has(file.type);

// Returns a copy in memory: the file may change before it is sent. Throws for what this browser cannot show.
export async function readPicture(file) {
  if (file.size > MOST_BYTES) throw new Error(`${file.name} has ${file.size} bytes; the limit of a picture is ${MOST_BYTES}`);
  const blob = new Blob([await file.arrayBuffer()], { type: file.type });
  const shown = await createImageBitmap(blob).catch(() => {
    throw new Error(`${file.name} is not a picture that this browser can show`);
  });
  shown.close();
  return { name: file.name, blob };
}

export function toData(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}

export function fromData(data) {
  const [head, type] = DATA.exec(data) ?? [];
  if (!type) throw new Error("a picture in it is neither PNG, JPEG, WebP nor GIF");
  return new Blob([Uint8Array.from(atob(data.slice(head.length)), (each) => each.charCodeAt(0))], { type });
}

// The part of a message that stands for its picture with this index, until `withPictures` replaces it.
export const partOf = (message, index) => ({ type: "image_url", image_url: { url: `${REFERENCE}${message.id}/${index}` } });

// Returns the body, a text, with the conversation's pictures in it.
export async function withPictures(body, conversation) {
  if (!body.includes(`"${REFERENCE}`)) return body;
  const whole = JSON.parse(body);
  for (const part of whole.messages.flatMap(({ content }) => (Array.isArray(content) ? content : []))) {
    const [id, index] = part.image_url?.url.split(REFERENCE)[1]?.split("/") ?? [];
    const blob = conversation.messages.get(id)?.files?.[index]?.blob;
    if (blob) part.image_url.url = await toData(blob);
  }
  return JSON.stringify(whole);
}

// An element that shows the picture. Its address lives until it is loaded.
export function pictureView({ name, blob }) {
  const image = new Image();
  image.src = URL.createObjectURL(blob);
  image.onload = image.onerror = () => URL.revokeObjectURL(image.src);
  image.alt = name;
  return image;
}

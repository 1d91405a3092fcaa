// IndexedDB: records of conversations, and of their messages one by one, so that a long conversation is saved cheaply.
const NAME = "penstock";
const VERSION = 1;

let opened = null;

function open() {
  opened ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, VERSION);
    request.onupgradeneeded = () => {
      request.result.createObjectStore("conversations", { keyPath: "id" });
      const messages = request.result.createObjectStore("messages", { keyPath: "id" });
      messages.createIndex("conversation", "conversation");
      messages.createIndex("isRunning", "isRunning"); // has only messages whose answers are not complete: isRunning is 1
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opened;
}

// Runs work in one transaction. Resolves with the result of the request that work returns, once all is on disk.
async function transact(mode, work) {
  const database = await open();
  return new Promise((resolve, reject) => {
    const transaction = database.transaction(["conversations", "messages"], mode);
    const request = work((name) => transaction.objectStore(name));
    transaction.oncomplete = () => resolve(request?.result);
    transaction.onabort = () => reject(transaction.error);
  });
}

export const allOf = (store) => transact("readonly", (at) => at(store).getAll());

export const get = (store, id) => transact("readonly", (at) => at(store).get(id));

export const messagesOf = (conversation) =>
  transact("readonly", (at) => at("messages").index("conversation").getAll(conversation));

export const runningMessages = () => transact("readonly", (at) => at("messages").index("isRunning").getAll(1));

export const put = (conversations, messages) => transact("readwrite", (at) => {
  for (const each of conversations) at("conversations").put(each);
  for (const each of messages) at("messages").put(each);
});

// Removes the conversation and all its messages.
export const remove = (conversation) => transact("readwrite", (at) => {
  at("conversations").delete(conversation);
  at("messages").index("conversation").getAllKeys(conversation).onsuccess = ({ target }) => {
    for (const key of target.result) at("messages").delete(key);
  };
});

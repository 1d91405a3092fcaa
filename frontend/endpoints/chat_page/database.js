// IndexedDB: records of conversations, and of their messages one by one, so that a long conversation is saved cheaply.
const NAME = "penstock";
const VERSION = 2;
const STORES = ["conversations", "messages", "drafts"];

let opened = null;

function open() {
  opened ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, VERSION);
    request.onupgradeneeded = ({ oldVersion }) => {
      request.result.createObjectStore("drafts", { keyPath: "id" });
      if (oldVersion) return;
      request.result.createObjectStore("conversations", { keyPath: "id" });
      const messages = request.result.createObjectStore("messages", { keyPath: "id" });
      messages.createIndex("conversation", "conversation");
      messages.createIndex("isRunning", "isRunning"); // has only messages whose answers are not complete: isRunning is 1
    };
    request.onblocked = () => reject(new Error("another tab shows an earlier version of it; close that, and reload this one"));
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opened;
}

// Runs work in one transaction. Resolves with the result of the request that work returns, once all is on disk.
async function transact(mode, work) {
  const database = await open();
  return new Promise((resolve, reject) => {
    const transaction = database.transaction(STORES, mode);
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

// records are lists by the name of their store.
export const put = (records) => transact("readwrite", (at) => {
  for (const [store, list] of Object.entries(records)) for (const each of list) at(store).put(each);
});

export const remove = (store, id) => transact("readwrite", (at) => at(store).delete(id));

// Removes the conversation and all its messages.
export const removeConversation = (conversation) => transact("readwrite", (at) => {
  at("conversations").delete(conversation);
  at("messages").index("conversation").getAllKeys(conversation).onsuccess = ({ target }) => {
    for (const key of target.result) at("messages").delete(key);
  };
});

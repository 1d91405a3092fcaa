// Answers read aloud, by voices of this device only: others would send the text to their makers.
let reads = null; // the button of the answer that is being read

function voiceHere() {
  const voices = speechSynthesis.getVoices().filter((voice) => voice.localService);
  return voices.find((voice) => voice.default) ?? voices[0];
}

export const canRead = "speechSynthesis" in globalThis;
if (canRead) speechSynthesis.getVoices(); // they are found only after the first call

function end() {
  if (reads) reads.textContent = "Read aloud";
  reads = null;
}

// Reads what the node shows, or stops if it is the one that is read.
export function readAloud(node, button) {
  const isRead = reads === button;
  speechSynthesis.cancel();
  end();
  if (isRead) return;
  const voice = voiceHere();
  if (!voice) {
    button.textContent = "This device has no voice";
    return;
  }
  node.classList.add("whole"); // Firefox has no text of parts that are not laid out
  const spoken = new SpeechSynthesisUtterance(node.innerText);
  node.classList.remove("whole");
  spoken.voice = voice;
  spoken.onend = spoken.onerror = () => reads === button && end();
  reads = button;
  button.textContent = "Stop reading";
  speechSynthesis.speak(spoken);
}

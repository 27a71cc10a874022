"use strict";
// What the page holds in base64: deflated bytes, and arrays of unsigned integers.

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// Numbers as planes of bytes, the lowest first.
async function numbers({ planes, data }, Kind) {
  const bytes = await unpack(data);
  const length = bytes.length / planes, result = new Kind(length);
  for (let plane = planes - 1; plane >= 0; plane--)
    for (let i = 0; i < length; i++) result[i] = result[i] * 256 + bytes[plane * length + i];
  return result;
}

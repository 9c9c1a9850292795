// A page to play with that is part of another page tells how high it is.
addEventListener("message", ({ source, data }) => {
  const frame = [...document.querySelectorAll("iframe.play")].find((each) => each.contentWindow === source);
  if (frame && Number.isFinite(data?.height)) frame.style.height = `${Math.ceil(data.height)}px`;
});

// What the address of the page names: a task, My work, or a lead's decisions.

// `account`: what /api/tasks returns. Without a task in the address, the first that has work.
export function readAddress(account) {
  const parameters = new URLSearchParams(location.search);
  const named = account.tasks.find((task) => task.name === parameters.get("task"));
  return { task: (named ?? account.tasks.find((task) => task.open) ?? account.tasks[0]).name, work: parameters.has("work"),
    decides: parameters.has("decide") && account.lead, item: Number(parameters.get("decide")) || null };
}

// `how`: pushState for a step that the back button takes back, replaceState otherwise.
export function setAddress(address, how) {
  if (address !== location.search) history[how](null, "", address);
}

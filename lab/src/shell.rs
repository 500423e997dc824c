// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Whether `make lab-shell` gives a person a shell, with everything in it: types
//! a line at its prompt, as a person would.

use std::io::{Read as _, Write as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::artifacts::Artifacts;
use crate::emulator;
use crate::run::Options;
use crate::verdict::Tried;

/// What the shell shows when it waits for a line.
const PROMPT: &str = "host# ";
/// Says what isn't there; then one word that isn't in the line itself.
const LINE: &str = "for f in /bin/vcpufreq /bin/vcpufreq-load /bin/rt-app /bin/cyclictest \
    /bin/stress-ng /bin/hackbench /lab/modules/vcpufreq_rt_loop.ko /lab/modules/vcpufreq_host.ko \
    /lab/guest-kernel /lab/guest-initramfs; do [ -e $f ] || echo miss''ing $f; done; \
    vcpufreq --version; cyclictest --help 2>&1 | head -n 1; echo al''l";

/// The shell's test.
pub fn check(artifacts: &Artifacts, repo: &Path) -> Tried {
    let options = Options {
        topology: "1".to_owned(),
        ..Options::of(&[])
    };
    let said = options.typed(artifacts, repo, LINE);
    let said = said.unwrap_or_else(|error| format!("{error:#}"));
    let lines = || said.lines().map(str::trim_end);
    let has = |start: &str| lines().any(|line| line.starts_with(start));
    let held = has("vcpufreq ") && has("cyclictest ") && lines().any(|line| line == "all");
    let held = held && !said.contains("missing");
    let name = "lab-shell: a line at its prompt, everything is there";
    Tried::new(name, held, || said.clone())
}

/// Starts `emulator`, types `line` and `exit` when the prompt is there; what the
/// console has shown. The emulator has ended when this returns.
pub fn typed(mut emulator: Command, line: &str, limit: Duration) -> Result<String> {
    let emulator = emulator.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = emulator.spawn().context("cannot start the emulator")?;
    let line = line.to_owned();
    let person = std::thread::spawn({
        let (input, output) = (child.stdin.take(), child.stdout.take());
        move || {
            let (mut input, mut output) = input.zip(output).context("no console")?;
            let mut seen = String::new();
            let mut bytes = [0; 4096];
            let mut typed = false;
            loop {
                let count = output.read(&mut bytes)?;
                if count == 0 {
                    ensure!(typed, "no prompt; the console has shown: {seen}");
                    return Ok(seen);
                }
                seen.push_str(&String::from_utf8_lossy(&bytes[..count]));
                if !typed && seen.contains(PROMPT) {
                    writeln!(input, "{line}; exit")?;
                    typed = true;
                }
            }
        }
    });
    let ended = ended(&mut child, limit);
    let seen = person.join();
    let seen = seen.unwrap_or_else(|_| Err(anyhow::anyhow!("the person panicked")))?;
    ended.with_context(|| format!("the console has shown: {seen}"))?;
    Ok(seen)
}

fn ended(child: &mut Child, limit: Duration) -> Result<()> {
    let status = emulator::wait(child, limit, || ())?;
    ensure!(status.success(), "the emulator failed ({status})");
    Ok(())
}

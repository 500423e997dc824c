// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promise: a command takes what its messages tell to give it. Each option in a message of the
//! sources is tried on the command line of each command that prints the message, and each command
//! that a message names is there.
//!
//! A message is a string with a space in it. Which commands print it follows from its file
//! ([`PRINTED_BY`]); where not all messages of a file are of the same commands, from [`ONLY`].

use std::{
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
};

use clap::CommandFactory as _;
use vcpufreq_host::{HostCpus, HostRoot, fakes::FakeHost};

use crate::{
    cli::{Cli, Command},
    dt, message, run,
    serve::Served,
};
use vcpufreq_vm::fakes::{FILE_LEN, image};

/// Guests of this program, and of others.
const GUESTS: &[&str] = &["run", "serve", "qemu"];
const LAB: &[&str] = &["demo", "bench", "report"];
const TUNING: &[&str] = &["rt plan", "rt apply", "rt check", "rt exec"];

/// Files or folders, and the commands that print their messages, or that these are about; the last
/// line that fits counts.
const PRINTED_BY: &[(&str, &[&str])] = &[
    ("benches/src/", LAB),
    ("benches/figures/src/", &[]),
    ("host-bpf/src/", &["run"]),
    ("rt/src/", TUNING),
    // Command lines of cyclictest and its like.
    ("rt/src/measure/", &[]),
    // They name what it reads.
    ("rt/src/cli/compare.rs", &["rt report"]),
    ("rt/src/cli/exec/", &["rt exec"]),
    ("rt/src/cli/report/", &["rt report"]),
    ("vmm-device/", &["run"]),
    ("vmm/src/", &[]),
    ("vmm/src/cli.rs", &["run"]),
    ("vmm/src/config/", &["run", "serve", "qemu", "dt"]),
    ("vmm/src/config/rt.rs", &["run"]),
    ("vmm/src/doctor/", &["run"]),
    ("vmm/src/dt.rs", &["dt"]),
    ("vmm/src/events/", GUESTS),
    ("vmm/src/host_guest/", LAB),
    ("vmm/src/options/", GUESTS),
    ("vmm/src/path.rs", &["run"]),
    ("vmm/src/qemu/", &["qemu"]),
    ("vmm/src/qemu_command/", &["qemu"]),
    ("vmm/src/rt_guest/", GUESTS),
    ("vmm/src/run/", &["run"]),
    ("vmm/src/sandbox/", GUESTS),
    ("vmm/src/serve/", &["serve", "qemu"]),
    ("vmm/src/serve/awaited.rs", &["serve"]),
    ("vmm/src/serve/booted_tree.rs", &["serve"]),
    ("vmm/src/serve/mod.rs", &["serve"]),
    ("vmm/src/serve/socket.rs", &["serve"]),
    ("vmm/src/serve/takeover.rs", &["serve"]),
    ("vmm/src/trace/", &["trace 7 --for=1s --out=a-name"]),
    // They name how a VMM was started.
    ("vmm/src/stats/", &["run"]),
    ("vmm/vm/src/", &["run"]),
];

/// Options in messages that only some of the file's commands print, or that are another program's.
const ONLY: &[(&str, &str, &[&str])] = &[
    ("vmm/src/config/mod.rs", "actuator", GUESTS),
    ("vmm/src/config/mod.rs", "floor", GUESTS),
    ("vmm/src/config/resolve.rs", "kernel", &["run"]),
    ("vmm/src/config/resolve.rs", "path", &["run"]),
    ("vmm/src/config/resolve.rs", "hugepages", &["run"]),
    ("vmm/src/config/resolve.rs", "actuator", GUESTS),
    ("vmm/src/config/resolve.rs", "cgroup-parent", GUESTS),
    ("vmm/src/config/resolve.rs", "clamp", GUESTS),
    ("vmm/src/options/mod.rs", "console", &["run"]),
    ("vmm/src/options/serve.rs", "dtb", &["serve"]),
    ("vmm/src/options/serve.rs", "pid", &["serve"]),
    ("vmm/src/options/serve.rs", "pid-file", &["serve"]),
    ("vmm/src/options/serve.rs", "socket", &["serve"]),
    ("vmm/src/options/serve.rs", "user", &["serve"]),
    ("vmm/src/serve/booted_tree.rs", "device-tree-overlay", &[]),
    ("vmm/src/serve/booted_tree.rs", "fdt-position", &[]),
    ("vmm/src/serve/booted_tree.rs", "virt-cpufreq-upstream", &[]),
    ("vmm/src/serve/guest_ram.rs", "dtb", &["serve"]),
    ("vmm/src/serve/guest_ram.rs", "path", &["qemu"]),
    ("vmm/src/doctor/domain/source.rs", "all", &[]),
    ("vmm/src/doctor/mod.rs", "release", &[]),
    ("vmm/src/path.rs", "no-default-features", &[]),
    ("vmm/src/scx/mod.rs", "no-default-features", &[]),
    ("vmm/src/serve/qmp.rs", "qmp", &["serve"]),
    ("vmm/vm/src/image_header.rs", "boot_img", &[]),
    ("vmm/vm/src/packed.rs", "format", &[]),
];

/// Where a message names a command: behind these.
const NAMED_BEHIND: &[&str] = &["see ", "run ", "start one with ", "; ", ": ", "("];

/// A value of each option that isn't in its message.
fn sample(option: &str) -> &'static str {
    match option {
        "table" => "0=1000,2000",
        "pin" => "0=0",
        "domain" | "capacity" | "ipc-ratio" => "0=1",
        "rt" => "0=fifo:1",
        "floor" => "0=600",
        "guest" => "plc=3",
        "guest-shell" => "sh",
        "rate-limit" | "cpus" | "others" | "guest-cpus" | "guest-others" | "housekeeping" => "1",
        "actuator" | "console" => "none",
        // Adding needs BPF, which this build may lack.
        "sum" => "false",
        "clamp" => "exact",
        "path" => "shm",
        "sandbox" => "off",
        "cur-perf" => "request",
        "mem" | "resume-latency-us" | "pid" => "512",
        "hugepages" => "2M",
        "loads" => "idle",
        "net-to" => "::1",
        "part" => "1h",
        "load-percent" | "stress-fifo" => "1",
        "base" => "0xa000000",
        _ => "a-name",
    }
}

/// What an option can't be without.
fn beside(option: &str) -> &'static [&'static str] {
    match option {
        "guest-shell" | "guest-only" => &["--guest-cpus=1"],
        "in-ram" => &["--merge=a-name"],
        _ => &[],
    }
}

#[test]
fn a_hint_is_taken_by_each_command_that_prints_it() {
    let (mut tried, mut refused) = (0, Vec::new());
    for (file, text) in messages() {
        for hint in options_in(&text) {
            for command in commands_of(&file, &hint) {
                tried += 1;
                let with_all = || takes_all(&command, &options_in(&text));
                if !hint.values().any(|value| takes(&command, &hint, value)) && !with_all() {
                    refused.push(format!("{command}: --{}: {file}: {text}", hint.option));
                }
            }
        }
    }
    assert!(refused.is_empty(), "{}", refused.join("\n"));
    assert!(tried >= 100 || is_package(), "{tried}");
}

#[test]
fn a_command_that_a_message_names_is_there() {
    let (mut named, mut missing) = (0, Vec::new());
    for (file, text) in messages() {
        for (at, program) in text.match_indices("vcpufreq ") {
            let before = &text[..at];
            if NAMED_BEHIND.iter().any(|word| before.ends_with(word)) {
                named += 1;
                if command_at(&text[at + program.len()..]).is_empty() {
                    missing.push(format!("{file}: {text}"));
                }
            }
        }
    }
    assert!(missing.is_empty(), "{}", missing.join("\n"));
    assert!(named >= 20 || is_package(), "{named}");
}

/// On a host without cpufreq, and on one of which one CPU has no policy.
#[test]
fn what_a_vcpu_without_frequencies_needs_is_taken_where_it_is_said() {
    let kernel = tempfile::NamedTempFile::new().unwrap();
    fs::write(kernel.path(), image(0x10000)).unwrap();
    kernel.as_file().set_len(FILE_LEN).unwrap();
    let kernel = format!("--kernel={}", kernel.path().display());
    let none = FakeHost::two_plus_two();
    none.remove("sys/devices/system/cpu/cpufreq");
    let some = FakeHost::two_plus_two();
    some.remove("sys/devices/system/cpu/cpufreq/policy2");
    let driver = "load the host's cpufreq driver";
    let rows: [(&[&str], [&[&str]; 2]); 4] = [
        (
            &["run", "--pin=0=3", &kernel],
            [&[driver, "--no-bridge"], &["--table", "--no-bridge"]],
        ),
        (
            &["dt", "--pin=0=3"],
            [&["--table", "--no-bridge"], &["--table", "--no-bridge"]],
        ),
        (
            &["serve", "--pin=0=3", "--sandbox=off"],
            [
                &[driver, "without vcpufreq"],
                &["--table", "without vcpufreq"],
            ],
        ),
        (
            &["qemu", "--pin=0=3", "--sandbox=off"],
            [
                &[driver, "without vcpufreq"],
                &["--table", "without vcpufreq"],
            ],
        ),
    ];
    for (line, said) in rows {
        for (host, said) in [&none, &some].into_iter().zip(said) {
            let error = checked(line, &host.root()).unwrap_err();
            let text = message::chain(&error);
            assert!(text.contains("vCPU 0 has no frequencies"), "{text}");
            for part in said {
                assert!(text.contains(part), "{line:?}: {text}");
            }
            for hint in options_in(&text) {
                let flag = match hint.option.as_str() {
                    "table" => "--table=0=1000,2000".to_owned(),
                    option => format!("--{option}"),
                };
                let line = [line, &[&flag]].concat();
                let done = checked(&line, &host.root());
                let why = done.map_err(|error| message::chain(&error));
                assert_eq!(why, Ok(()), "{line:?}");
            }
        }
    }
}

/// As far as a command gets with the options and this host before it changes anything.
fn checked(line: &[&str], root: &HostRoot) -> anyhow::Result<()> {
    match read(line)?.command {
        Command::Run(args) => run::configuration(*args, &HostCpus::read(root)).map(|_| ()),
        Command::Dt(args) => dt::dt(&args, root).map(|_| ()),
        Command::Serve(args) => Served::check(args.served, root.clone()).map(|_| ()),
        Command::Qemu(args) => Served::check(args.served, root.clone()).map(|_| ()),
        other => panic!("{other:?}"),
    }
}

fn read(line: &[&str]) -> anyhow::Result<Cli> {
    let behind: &[&str] = match line {
        ["qemu", ..] | ["rt", "exec", ..] => &["--", "qemu-system-aarch64"],
        _ => &[],
    };
    let words = ["vcpufreq"].iter().chain(line).chain(behind);
    Cli::read(words.map(OsString::from).collect())
}

/// An option in a message.
#[derive(Debug)]
struct Hint {
    /// Its name.
    option: String,
    /// The word behind it, which may be its value.
    next: String,
    /// The command that the message names before it, if it does.
    command: String,
    /// The message tells to leave it out.
    is_unwanted: bool,
}

impl Hint {
    /// What may be its value; none for a switch.
    fn values(&self) -> impl Iterator<Item = Option<&str>> {
        [Some(self.next.as_str()), Some(sample(&self.option)), None].into_iter()
    }
}

fn options_in(text: &str) -> Vec<Hint> {
    let mut hints = Vec::new();
    for clause in text.split("; ") {
        for (at, _) in clause.match_indices("--") {
            let is_end = |c: char| !c.is_ascii_alphanumeric() && !"-_".contains(c);
            let (before, behind) = (&clause[..at], &clause[at + 2..]);
            let option = behind.split(is_end).next().unwrap_or_default();
            if !option.starts_with(|c: char| c.is_ascii_lowercase())
                || before.ends_with(|c: char| c.is_ascii_alphanumeric())
            {
                continue;
            }
            let rest = behind[option.len()..].trim_start_matches(['=', ' ']);
            let next = rest.split([' ', ')', ';']).next().unwrap_or_default();
            let named = before.rsplit_once("vcpufreq ").map(|(_, named)| named);
            let named = named.filter(|named| !named.contains(')'));
            hints.push(Hint {
                option: option.to_owned(),
                next: next.trim_end_matches(',').to_owned(),
                command: named.map(command_at).unwrap_or_default(),
                is_unwanted: text.contains("leave "),
            });
        }
    }
    hints
}

/// The command that a text begins with, as `rt apply`; empty if it is none.
fn command_at(text: &str) -> String {
    let program = Cli::command();
    let (mut command, mut names) = (&program, Vec::new());
    for word in text.split(|c: char| !c.is_ascii_alphanumeric()) {
        let Some(found) = command.find_subcommand(word) else {
            break;
        };
        names.push(word);
        command = found;
    }
    names.join(" ")
}

fn commands_of(file: &str, hint: &Hint) -> Vec<String> {
    if !hint.command.is_empty() {
        return vec![hint.command.clone()];
    }
    let only = ONLY
        .iter()
        .find(|(of, option, _)| *of == file && *option == hint.option);
    let commands = match only {
        Some((.., commands)) => commands,
        None => {
            let mut fit = PRINTED_BY.iter().rev();
            let (part, commands) = fit.find(|(part, _)| file.starts_with(part)).unwrap();
            // No command, so that the hint is refused: its file has to be in the table.
            match *part == "vmm/src/" {
                true => &[""][..],
                false => commands,
            }
        }
    };
    commands.iter().map(|name| (*name).to_owned()).collect()
}

/// Whether a command line with this option is right, but for what the host lacks.
fn takes(command: &str, hint: &Hint, value: Option<&str>) -> bool {
    let flag = match value {
        Some(value) => format!("--{}={value}", hint.option),
        None => format!("--{}", hint.option),
    };
    let mut line: Vec<&str> = command.split_whitespace().collect();
    line.extend(beside(&hint.option));
    line.push(&flag);
    let served = match read(&line) {
        // The help's text is no error of the command line.
        Err(error) => return error.downcast_ref::<clap::Error>().is_some(),
        Ok(cli) => match cli.command {
            Command::Serve(args) => args.served,
            Command::Qemu(args) => args.served,
            _ => return true,
        },
    };
    hint.is_unwanted || served.check().is_ok()
}

/// The same with all of a message's options: `name --kernel and --initrd`.
fn takes_all(command: &str, hints: &[Hint]) -> bool {
    let flag = |hint: &Hint| format!("--{}={}", hint.option, sample(&hint.option));
    let flags: Vec<_> = hints.iter().map(flag).collect();
    let words = command.split_whitespace();
    read(
        &words
            .chain(flags.iter().map(String::as_str))
            .collect::<Vec<_>>(),
    )
    .is_ok()
}

/// The strings with a space in the sources without their tests, and the files that they are in; none
/// in a package, which has one crate's.
fn messages() -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut messages = Vec::new();
    if is_package() {
        println!("SKIP: the sources of the workspace aren't here");
        return messages;
    }
    let folders = PRINTED_BY.iter().map(|(part, _)| root.join(part));
    let mut left: Vec<PathBuf> = folders.filter(|part| part.ends_with("src")).collect();
    while let Some(path) = left.pop() {
        if path.is_dir() {
            let entries = fs::read_dir(path).unwrap();
            left.extend(entries.map(|entry| entry.unwrap().path()));
            continue;
        }
        let name = path.strip_prefix(&root).unwrap().display().to_string();
        if name.ends_with(".rs") && !name.ends_with("tests.rs") {
            let text = fs::read_to_string(path).unwrap();
            let strings = strings(text.split("#[cfg(test)]\nmod ").next().unwrap());
            let strings = strings.into_iter().filter(|string| string.contains(' '));
            messages.extend(strings.map(|string| (name.clone(), string)));
        }
    }
    messages
}

fn is_package() -> bool {
    !Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../vmm/src")
        .is_dir()
}

/// The strings of a source, lines that are continued joined; raw ones too.
fn strings(source: &str) -> Vec<String> {
    let mut strings = Vec::new();
    let mut rest = source;
    while let Some(at) = rest.find(['"', '/', '\'']) {
        let found = &rest[at..];
        let (skipped, string) = match found {
            _ if found.starts_with("//") => (found.find('\n'), None),
            _ if found.starts_with("'\"'") => (Some(3), None),
            _ if found.starts_with("'\\") => (Some(3), None),
            _ if found.starts_with('"') => {
                let hashes = rest[..at].len() - rest[..at].trim_end_matches('#').len();
                let is_raw = rest[..at - hashes].ends_with('r');
                match is_raw {
                    true => {
                        let end = format!("\"{}", "#".repeat(hashes));
                        let len = found[1..].find(&end).map(|len| len + 1);
                        (len.map(|len| len + end.len()), len)
                    }
                    false => {
                        let len = closing_quote(found);
                        (len.map(|len| len + 1), len)
                    }
                }
            }
            _ => (Some(1), None),
        };
        strings.extend(string.map(|len| joined(&found[1..len])));
        let Some(skipped) = skipped else { break };
        rest = &found[skipped..];
    }
    strings
}

/// Where the string that begins with a quote ends.
fn closing_quote(text: &str) -> Option<usize> {
    let mut escaped = false;
    let mut chars = text.char_indices().skip(1);
    chars.find_map(|(at, c)| {
        let ends = c == '"' && !escaped;
        escaped = c == '\\' && !escaped;
        ends.then_some(at)
    })
}

fn joined(string: &str) -> String {
    let lines = string.split("\\\n").map(str::trim_start);
    let first = string.split("\\\n").next().unwrap_or_default();
    let rest: Vec<_> = lines.skip(1).collect();
    std::iter::once(first).chain(rest).collect()
}

#[test]
fn strings_are_found() {
    let source = "let a = \"one \\\"two\\\"\"; // \"no\"\nlet b = '\"';\nlet c = r#\"a \"b\" c\"#;\n\
                  let d = \"x \\\n    y\"; let e: &'static str = '\\'';";
    assert_eq!(strings(source), ["one \\\"two\\\"", "a \"b\" c", "x y"]);
}

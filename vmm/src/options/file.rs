// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The TOML file of `--config`: each key is a long option of `run` or `serve` and stands for that
//! flag, under `[vcpu.VCPUS]` for `--KEY VCPUS=VALUE`. The flags of a file come before those of the command
//! line, so that the latter win.

use std::{ops::Range, path::Path};

use anyhow::anyhow;
use clap::{ArgAction, Args, Command};
use toml::{
    Spanned,
    de::{DeTable, DeValue},
};
use vcpufreq_host::CpuList;

use super::{RunArgs, serve::ListenArgs};
use crate::message::{one_line, usage};

/// A flag that a key stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flag {
    /// The name of the long option.
    pub name: String,
    /// `--NAME` or `--NAME=VALUE`.
    pub text: String,
}

/// The flags of the file at `path`, each of which `run` or `serve` takes.
///
/// # Errors
/// One line: why it can't be read, or where it is malformed or has an unknown key or value, and
/// what to do.
pub fn read(path: &Path) -> anyhow::Result<Vec<Flag>> {
    let text = std::fs::read_to_string(path);
    let path = path.display();
    let text = text.map_err(|why| {
        anyhow!("config file {path} can't be read: {why}; check the path and its permissions")
    })?;
    parse(&text).map_err(|(line, message)| {
        anyhow!(
            "config file {path}, line {line}: {message}; correct it, the keys are the long options \
             (see vcpufreq run --help and vcpufreq serve --help)"
        )
    })
}

/// The flags of a TOML text; an error has its line, counted from 1, and one line of text.
pub fn parse(text: &str) -> Result<Vec<Flag>, (usize, String)> {
    let found = DeTable::parse(text).map_err(|error| {
        let span = error.span().unwrap_or_default();
        Wrong(span, one_line(error.message()))
    });
    let flags = found.and_then(|table| flags(table.get_ref()));
    flags.map_err(|Wrong(span, message)| {
        let before = text.as_bytes().iter().take(span.start);
        (1 + before.filter(|byte| **byte == b'\n').count(), message)
    })
}

/// Where something is wrong, and what.
struct Wrong(Range<usize>, String);

type Key<'a> = Spanned<std::borrow::Cow<'a, str>>;
type TomlValue<'a> = Spanned<DeValue<'a>>;

fn flags(table: &DeTable<'_>) -> Result<Vec<Flag>, Wrong> {
    let command = RunArgs::augment_args(Command::new("run").no_binary_name(true));
    let command = ListenArgs::augment_args(command);
    let mut flags = Vec::new();
    for (key, value) in table {
        match value.get_ref().as_table() {
            // Of flags for one vCPU the last counts. Where lists overlap, the first in the order
            // of their text wins.
            Some(lists) if key.get_ref() == "vcpu" => {
                for (list, options) in lists.iter().rev() {
                    flags.extend(of_vcpus(&command, list, options)?);
                }
            }
            _ => flags.extend(flag(&command, None, (key, value))?),
        }
    }
    Ok(flags)
}

fn of_vcpus(command: &Command, list: &Key, options: &TomlValue) -> Result<Vec<Flag>, Wrong> {
    let wrong = |why| Wrong(list.span(), format!("[vcpu.{}]: {why}", list.get_ref()));
    if let Err(why) = list.get_ref().parse::<CpuList>() {
        return Err(wrong(why.to_string()));
    }
    let Some(options) = options.get_ref().as_table() else {
        return Err(wrong("expected a table".to_owned()));
    };
    let flags = options
        .iter()
        .filter_map(|option| flag(command, Some(list.get_ref()), option).transpose());
    flags.collect()
}

/// The flag of one key, unless it is a switch that is off.
fn flag(
    command: &Command,
    vcpus: Option<&str>,
    (key, value): (&Key, &TomlValue),
) -> Result<Option<Flag>, Wrong> {
    let name = &**key.get_ref();
    let is_named = |arg: &&clap::Arg| arg.get_long() == Some(name);
    let mut all = command.get_arguments();
    // Flags that may be repeated are those of vCPUs.
    let found = all.find(is_named).filter(|arg| {
        name != "config" && matches!(arg.get_action(), ArgAction::Append) == vcpus.is_some()
    });
    let Some(arg) = found else {
        return Err(Wrong(key.span(), format!("unknown key `{name}`")));
    };
    let text = match (arg.get_action(), value.get_ref()) {
        (ArgAction::SetTrue, DeValue::Boolean(false)) => return Ok(None),
        (ArgAction::SetTrue, DeValue::Boolean(true)) => format!("--{name}"),
        (ArgAction::SetTrue, _) => {
            let message = format!("`{name}` is true or false");
            return Err(Wrong(value.span(), message));
        }
        (_, of_other_type @ (DeValue::Boolean(_) | DeValue::Datetime(_) | DeValue::Table(_)))
            if arg
                .get_num_args()
                .is_none_or(|values| values.min_values() > 0) =>
        {
            let message = format!(
                "`{name}` is text or a number, not a {}",
                of_other_type.type_str()
            );
            return Err(Wrong(value.span(), message));
        }
        (_, DeValue::Array(entries))
            if name != "table"
                || entries
                    .iter()
                    .any(|entry| matches!(entry.get_ref(), DeValue::Array(_))) =>
        {
            let message = format!("`{name}` takes no such array");
            return Err(Wrong(value.span(), message));
        }
        (_, value) => {
            let vcpus = vcpus.map(|vcpus| format!("{vcpus}="));
            format!("--{name}={}{}", vcpus.unwrap_or_default(), written(value))
        }
    };
    match command.clone().try_get_matches_from([&text]) {
        Ok(_) => Ok(Some(Flag {
            name: arg.get_long().unwrap_or(name).to_owned(),
            text,
        })),
        Err(error) => Err(Wrong(value.span(), usage(&error))),
    }
}

/// A value as the flag has it: `[{ khz = 1, uv = 2 }, { khz = 3, uv = 4 }]` is `1:2,3:4`.
fn written(value: &DeValue<'_>) -> String {
    match value {
        DeValue::String(text) => text.to_string(),
        DeValue::Integer(number) => number.to_string(),
        // As the file has it: no arithmetic is done in floating point.
        DeValue::Float(number) => number.to_string(),
        DeValue::Boolean(on) => on.to_string(),
        DeValue::Datetime(time) => time.to_string(),
        DeValue::Array(entries) => {
            let entries = entries.iter().map(|entry| written(entry.get_ref()));
            entries.collect::<Vec<_>>().join(",")
        }
        DeValue::Table(opp) => opp_written(opp),
    }
}

/// An entry of a performance table; another key makes it no entry.
fn opp_written(opp: &DeTable<'_>) -> String {
    let value = |name| opp.get(name).map(|value| written(value.get_ref()));
    let known = ["khz", "uv", "uw"].map(value);
    if known.iter().flatten().count() != opp.len() {
        let keys: Vec<_> = opp.keys().map(|key| key.get_ref().as_ref()).collect();
        return format!("{{{}}}", keys.join(" "));
    }
    let last = known.iter().rposition(Option::is_some).unwrap_or(0);
    let fields = known.into_iter().take(last + 1);
    fields
        .map(Option::unwrap_or_default)
        .collect::<Vec<_>>()
        .join(":")
}

#[cfg(test)]
impl RunArgs {
    /// The options of a config file.
    pub fn of_toml(text: &str) -> Self {
        use clap::FromArgMatches;
        let flags = parse(text).unwrap();
        let command = Self::augment_args(Command::new("run").no_binary_name(true));
        let matches = command.try_get_matches_from(flags.iter().map(|flag| &flag.text));
        Self::from_arg_matches(&matches.unwrap()).unwrap()
    }
}

#[cfg(test)]
mod tests {
    //! A key stands for the flag of its name; an unknown key and a wrong value are named with their
    //! line.

    use super::*;

    fn texts(toml: &str) -> Vec<String> {
        let flags = parse(toml).unwrap().into_iter();
        flags.map(|flag| flag.text).collect()
    }

    #[test]
    fn shipped_examples_have_known_keys() {
        let guest = texts(include_str!("../../docs/examples/guest.toml"));
        assert!(guest.contains(&"--pin=1=4".to_owned()), "{guest:?}");
        let mut server = texts(include_str!("../../docs/examples/serve.toml"));
        server.sort();
        assert_eq!(server, ["--cpus=2", "--pin=0=0", "--pin=1=4"]);
        let server = texts(include_str!("../../docs/examples/serve-rt.toml"));
        for flag in [
            "--resume-latency-us=50",
            "--rt=1=fifo:1",
            "--floor=1=1200000",
        ] {
            assert!(server.contains(&flag.to_owned()), "{flag}: {server:?}");
        }
    }

    #[test]
    fn a_key_is_a_flag() {
        for (toml, flags) in [
            ("kernel = 'Image'", &["--kernel=Image"][..]),
            ("mem = 512", &["--mem=512"]),
            ("no-bridge = true\nexplain = false", &["--no-bridge"]),
            ("host-topology = false", &["--host-topology=false"]),
            ("cur-perf = 'exact'", &["--cur-perf=exact"]),
            ("rate-limit = 0", &["--rate-limit=0"]),
            ("clamp = 'exact'", &["--clamp=exact"]),
            ("resume-latency-us = '50'", &["--resume-latency-us=50"]),
            ("hugepages = '2M'", &["--hugepages=2M"]),
            ("console = 'file:a,max=2'", &["--console=file:a,max=2"]),
            (
                "socket = '/run/vm'\nuser = 'me'",
                &["--socket=/run/vm", "--user=me"],
            ),
            ("[vcpu.2]\ncapacity = 512", &["--capacity=2=512"]),
            ("[vcpu.3]\ndomain = 9", &["--domain=3=9"]),
            ("[vcpu.2]\nrt = 'fifo:3'", &["--rt=2=fifo:3"]),
            ("[vcpu.0-1]\npin = 0", &["--pin=0-1=0"]),
            ("[vcpu.2]\nipc-ratio = 0.75", &["--ipc-ratio=2=0.75"]),
            ("[vcpu.0]\ntable = [1, 2]", &["--table=0=1,2"]),
            (
                "[vcpu.0]\ntable = [{ khz = 1, uv = 2 }, { khz = 3, uv = 4, uw = 5 }]",
                &["--table=0=1:2,3:4:5"],
            ),
            ("[vcpu.0]\ntable = '1:2:3'", &["--table=0=1:2:3"]),
            (
                "[vcpu.0]\ntable = [{ khz = 1, uw = 5 }]",
                &["--table=0=1::5"],
            ),
            (
                // Of overlapping lists the first wins.
                "[vcpu.0-1]\nfloor = 1\n[vcpu.1]\nfloor = 2",
                &["--floor=1=2", "--floor=0-1=1"],
            ),
        ] {
            assert_eq!(texts(toml), flags, "{toml}");
        }
    }

    /// With the keys that it has as a comment, too.
    #[test]
    fn the_example_is_taken_whole() {
        let file = include_str!("../../docs/examples/guest.toml");
        let (first, second) = file.split_once("# [vcpu.2-3]").unwrap();
        let second = second.replace("\n# ", "\n");
        let options = RunArgs::of_toml(&format!("{first}[vcpu.2-3]{second}"));
        assert_eq!(options.mem.0, 1024);
        assert_eq!(options.vcpus.largest_named(), Some(3));
        assert_eq!(options.vcpus.table[0].value.0.len(), 2);
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line() {
        for (text, line, name) in [
            ("cpus = 1\nkernal = 'x'\n", 2, "kernal"),
            ("[vcpu.0]\npins = 1\n", 2, "pins"),
            ("[vcpu.x]\npin = 1\n", 1, "vcpu.x"),
            ("vcpu = 1", 1, "vcpu"),
            ("config = 'x'", 1, "config"),
            ("help = true", 1, "help"),
            ("pin = '0=1'", 1, "pin"),
            ("[vcpu.0]\nkernel = 'x'", 2, "kernel"),
            ("\ncpus =", 2, ""),
            ("cpus = -1", 1, "cpus"),
            ("mem = 'much'", 1, "'much' is no memory size"),
            ("clamp = 'soft'", 1, "'soft'"),
            ("explain = 'yes'", 1, "explain"),
            ("events = true", 1, "events"),
            ("cmdline = ['a', 'b']", 1, "cmdline"),
            ("kernel = 2026-01-01", 1, "kernel"),
            ("[vcpu.0]\ntable=[[1, 2], [3]]", 2, "table"),
            ("[vcpu.0]\npin='x'", 2, "'x'"),
            ("[vcpu.0]\ntable=[{khz=1,mv=2}]", 2, "table"),
        ] {
            let (at, message) = parse(text).unwrap_err();
            assert_eq!(at, line, "{text}: {message}");
            let named = message.contains(name) && !message.is_empty();
            assert!(named && !message.contains('\n'), "{text}: {message}");
        }
    }
}

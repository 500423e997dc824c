// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promises: each command has a manual page with what its `--help` prints: its options, each with
//! its text, and what is below them. Each shell completes each of these options, and no command that
//! `--help` hides.
#![allow(clippy::unwrap_used)]

#[path = "../examples/pages.rs"]
mod pages;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

/// What `--help` of a command prints.
struct Help {
    /// `vcpufreq-rt-plan`.
    name: String,
    /// `--json`, and its text without values and default, which pages put elsewhere.
    options: Vec<(String, String)>,
    /// Below the options.
    end: String,
}

impl Help {
    fn read(words: &[String]) -> (Self, Vec<String>) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vcpufreq"));
        let output = command.args(words).arg("--help").output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let below = section(&text, "Commands:").filter(|line| !line.starts_with("   "));
        let below = below.filter_map(|line| line.split_whitespace().next());
        let below = below.filter(|name| *name != "help").map(str::to_owned);
        let end = text.lines().skip_while(|line| *line != "Options:").skip(1);
        let end = end.skip(section(&text, "Options:").count());
        let help = Self {
            name: [&["vcpufreq".to_owned()], words].concat().join("-"),
            options: options(&text),
            end: words_of(&end.collect::<Vec<_>>().join("\n")),
        };
        (help, below.collect())
    }
}

/// Of this command and all below it.
fn helps(words: &[String]) -> Vec<Help> {
    let (help, below) = Help::read(words);
    let below = below.into_iter().map(|name| [words, &[name]].concat());
    let below: Vec<Help> = below.flat_map(|words| helps(&words)).collect();
    [help].into_iter().chain(below).collect()
}

/// The lines below a title.
fn section<'a>(text: &'a str, title: &'static str) -> impl Iterator<Item = &'a str> {
    let lines = text.lines().skip_while(move |line| *line != title).skip(1);
    lines.take_while(|line| line.is_empty() || line.starts_with(' '))
}

fn options(text: &str) -> Vec<(String, String)> {
    let mut options: Vec<(String, String)> = Vec::new();
    for line in section(text, "Options:") {
        let start = line.trim_start();
        // Deeper lines are text.
        if start.starts_with('-') && line.len() - start.len() <= 6 {
            let (head, text) = start.split_once("  ").unwrap_or((start, ""));
            let mut names = head.split([' ', ',', '[', '=']);
            let long = names.find(|name| name.starts_with("--")).unwrap();
            options.push((long.to_owned(), text.to_owned()));
        } else if let Some((_, text)) = options.last_mut() {
            text.push_str(line);
        }
    }
    for (_, text) in &mut options {
        let plain = text.split(" [").next().unwrap_or_default();
        *text = words_of(plain.split("Possible values:").next().unwrap_or_default());
    }
    options
}

fn words_of(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The words of a page, without the marks of its form.
fn plain(page: &str) -> String {
    let lines = page.lines().filter(|line| !line.starts_with('.'));
    let mut text = lines.collect::<Vec<_>>().join("\n");
    for (mark, plain) in [
        ("\\fB", ""),
        ("\\fI", ""),
        ("\\fR", ""),
        ("\\&", ""),
        ("\\-", "-"),
        ("\\*(Aq", "'"),
    ] {
        text = text.replace(mark, plain);
    }
    words_of(&text)
}

fn named(folder: &Path, ends: &str) -> BTreeSet<String> {
    let files = fs::read_dir(folder).unwrap();
    let names = files.map(|file| file.unwrap().file_name().into_string().unwrap());
    let named = names.filter_map(|name| Some(name.strip_suffix(ends)?.to_owned()));
    named.collect()
}

#[test]
fn pages_have_what_help_has() {
    let folder = tempfile::tempdir().unwrap();
    pages::write(folder.path()).unwrap();
    let commands = helps(&[]);
    let names: BTreeSet<String> = commands.iter().map(|help| help.name.clone()).collect();
    assert_eq!(named(folder.path(), ".1"), names);
    for help in &commands {
        let page = fs::read_to_string(folder.path().join(format!("{}.1", help.name))).unwrap();
        let heads = page.split("\\fB\\-\\-").skip(1);
        let heads = heads.filter_map(|rest| rest.split_once("\\fR"));
        let heads: BTreeSet<String> = heads
            .map(|(name, _)| format!("--{}", name.replace("\\-", "-")))
            .collect();
        let wanted: BTreeSet<String> = help.options.iter().map(|one| one.0.clone()).collect();
        assert!(wanted.contains("--help"), "{}", help.name);
        assert_eq!(heads, wanted, "{}", help.name);
        let page = plain(&page);
        for (option, text) in &help.options {
            assert!(
                page.contains(text),
                "{} {option}: {text}\n{page}",
                help.name
            );
        }
        assert!(
            page.contains(&help.end),
            "{}: {}\n{page}",
            help.name,
            help.end
        );
    }
}

#[test]
fn shells_complete_each_option() {
    let folder = tempfile::tempdir().unwrap();
    pages::write(folder.path()).unwrap();
    let commands = helps(&[]);
    for (file, dashes) in [
        ("vcpufreq.bash", "--"),
        ("_vcpufreq", "--"),
        ("vcpufreq.fish", "-l "),
    ] {
        let text = fs::read_to_string(folder.path().join(file)).unwrap();
        for (option, _) in commands.iter().flat_map(|help| &help.options) {
            let option = option.replacen("--", dashes, 1);
            assert!(text.contains(&option), "{file} lacks {option}");
        }
        assert!(!text.contains("guardian"), "{file} has a hidden command");
    }
}

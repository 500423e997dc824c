// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promises: each command has a manual page with what its `--help` prints: its options, each with
//! its text, and what is below them. bash and fish complete these options of each command and no others,
//! zsh these of all commands; none completes a command that `--help` hides.
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

/// The options that bash offers behind a command.
fn of_bash(text: &str, command: &str) -> BTreeSet<String> {
    let case = format!("\n        {})\n", command.replace('-', "__subcmd__"));
    let behind = text.split_once(&case).unwrap().1;
    let words = behind.split('"').nth(1).unwrap().split(' ');
    let options = words.filter(|word| word.starts_with("--"));
    options.map(str::to_owned).collect()
}

/// The options that fish offers behind a command, which has at most two words.
fn of_fish(text: &str, command: &str) -> BTreeSet<String> {
    let words: Vec<_> = command.split('-').skip(1).collect();
    let wanted = match words[..] {
        [] => "needs_command".to_owned(),
        [one] => format!("using_subcommand {one}"),
        _ => format!(
            "using_subcommand {}",
            words.join("; and __fish_seen_subcommand_from ")
        ),
    };
    let offered = text.lines().filter_map(|line| {
        let line = line.strip_prefix("complete -c vcpufreq -n \"__fish_vcpufreq_")?;
        let (condition, rest) = line.split_once('"')?;
        let condition = condition.split("; and not ").next()?;
        let (_, option) = rest.split(" -d ").next()?.split_once(" -l ")?;
        (condition == wanted).then(|| format!("--{}", option.split(' ').next().unwrap_or_default()))
    });
    offered.collect()
}

/// The options that zsh offers behind any command: `'(-h --help)--help[Print help]'` is one.
fn of_zsh(text: &str) -> BTreeSet<String> {
    let lines = text.lines().filter(|line| line.starts_with('\''));
    let heads = lines.filter_map(|line| line.split('[').next()?.rsplit(['\'', ')', '*']).next());
    let options = heads.filter(|head| head.starts_with("--"));
    options
        .map(|head| head.trim_end_matches(['=', '+']).to_owned())
        .collect()
}

#[test]
fn shells_complete_the_options_of_help_alone() {
    let folder = tempfile::tempdir().unwrap();
    pages::write(folder.path()).unwrap();
    let read = |file| fs::read_to_string(folder.path().join(file)).unwrap();
    let [bash, fish, zsh] = ["vcpufreq.bash", "vcpufreq.fish", "_vcpufreq"].map(read);
    let names = |help: &Help| -> BTreeSet<String> {
        let options = help.options.iter();
        options.map(|(name, _)| name.clone()).collect()
    };
    let commands = helps(&[]);
    for help in &commands {
        let wanted = names(help);
        assert_eq!(of_bash(&bash, &help.name), wanted, "bash: {}", help.name);
        assert_eq!(of_fish(&fish, &help.name), wanted, "fish: {}", help.name);
    }
    let all: BTreeSet<String> = commands.iter().flat_map(names).collect();
    assert_eq!(of_zsh(&zsh), all);
    let of_a_command = ["vcpufreq,NAME", "-a \"NAME\"", "'NAME:"];
    for (text, command) in [bash, fish, zsh].iter().zip(of_a_command) {
        assert!(text.contains(&command.replace("NAME", "serve")));
        let hidden = command.replace("NAME", "guardian");
        assert!(!text.contains(&hidden), "a hidden command");
    }
}

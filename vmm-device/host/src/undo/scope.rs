// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Everything that a program may change. A record that names anything else isn't carried out: root
//! acts on records.

use super::target::Target;

/// What the records of a program may name. In a path, `*` is any text within one component, and
/// `!policy*` is any component that `policy*` isn't.
#[derive(Clone, Copy, Debug)]
pub struct JournalScope {
    /// Files.
    pub files: &'static [&'static str],
    /// Files that go with something else, such as a governor's.
    pub inside: &'static [&'static str],
    /// Files that show what was written to another one.
    pub shown_in: &'static [&'static str],
    /// Folders that are made.
    pub dirs: &'static [&'static str],
    /// Names of kernel threads.
    pub threads: &'static [&'static str],
}

impl JournalScope {
    /// Whether `target` is one of them.
    #[must_use]
    pub fn has(&self, target: &Target) -> bool {
        match target {
            Target::File { path, shown_in, .. } => {
                let shown = shown_in.as_ref();
                is_one_of(path, self.files)
                    && shown.is_none_or(|path| is_one_of(path, self.shown_in))
            }
            Target::Dir { path } => is_one_of(path, self.dirs),
            Target::Inside { path, or_at, .. } => {
                let other = or_at.as_ref();
                is_one_of(path, self.inside)
                    && other.is_none_or(|path| is_one_of(path, self.inside))
            }
            Target::Thread { name, .. } => is_one_of(name, self.threads),
        }
    }
}

fn is_one_of(path: &str, patterns: &[&str]) -> bool {
    patterns.iter().any(|pattern| matches(path, pattern))
}

fn matches(path: &str, pattern: &str) -> bool {
    let (mut parts, mut wanted) = (path.split('/'), pattern.split('/'));
    loop {
        match (parts.next(), wanted.next()) {
            (None, None) => return true,
            (Some(part), Some(wanted)) if part_matches(part, wanted) => {}
            _ => return false,
        }
    }
}

/// `cpu*` of `cpu3`. What `*` stands for is never empty.
fn part_matches(part: &str, pattern: &str) -> bool {
    if let Some(other) = pattern.strip_prefix('!') {
        return part_matches(part, "*") && !part_matches(part, other);
    }
    let Some((start, end)) = pattern.split_once('*') else {
        return part == pattern;
    };
    let middle = part
        .strip_prefix(start)
        .and_then(|rest| rest.strip_suffix(end));
    middle.is_some_and(|middle| !middle.is_empty()) && part != "." && part != ".."
}

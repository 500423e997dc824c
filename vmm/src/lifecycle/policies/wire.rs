// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What `vcpufreq policy` and a guardian send each other: a line of JSON each, with the version of this
//! form. Behind the line of a load is the object.

use serde::{Deserialize, Serialize};

/// The version of the form.
pub const VERSION: u32 = 1;
/// More than a line has bytes.
pub const LINE: u64 = 4096;
/// More than a policy's object has bytes.
pub const OBJECT: u64 = 1 << 20;
/// More than a policy's name has bytes.
pub const NAME: usize = 32;

/// A line to a guardian.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PolicyCall {
    pub version: u32,
    pub call: PolicyVerb,
}

/// What the guardian is to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum PolicyVerb {
    /// Tries a policy, and puts it into force unless it is for a trial alone.
    Load {
        name: String,
        bytes: u64,
        trial: bool,
    },
    /// Has the built-in rule back.
    Reset,
    /// Tells what is in force.
    Show,
}

/// A line from a guardian.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyReply {
    pub version: u32,
    pub reply: PolicyAnswer,
}

/// What has become of a call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PolicyAnswer {
    /// It is done; this is in force now. Nothing: the built-in rule.
    InForce(Option<ShownPolicy>),
    /// It is not, and nothing has changed.
    Error(String),
}

/// A policy that is in force.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShownPolicy {
    pub name: String,
    /// SHA-256 of its file.
    pub sha256: String,
    /// Since when, ms since 1970.
    pub since_unix_ms: u64,
    /// How often it was asked since then.
    pub asked: u64,
    /// Of these, answers outside of the VM's limits, which counted.
    pub bounded: u64,
    /// Of these, no answer: the built-in rule counted.
    pub silent: u64,
}

/// Whether it can be a policy's name.
pub fn is_name(text: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b".-_+".contains(&byte);
    !text.is_empty() && text.len() < NAME && text.bytes().all(plain)
}

impl PolicyVerb {
    /// The call in a line.
    ///
    /// # Errors
    /// Why it is none, in one line.
    #[cfg_attr(not(feature = "bpf"), allow(dead_code))]
    pub fn read(line: &[u8]) -> Result<Self, String> {
        let call = serde_json::from_slice::<PolicyCall>(line);
        match call {
            Ok(PolicyCall { version, call }) if version == VERSION => Ok(call),
            _ => Err(format!(
                "not a call; send load, reset or show, of version {VERSION}"
            )),
        }
    }

    /// Its line.
    pub fn line(self) -> serde_json::Result<String> {
        let (version, call) = (VERSION, self);
        Ok(serde_json::to_string(&PolicyCall { version, call })? + "\n")
    }
}

impl PolicyAnswer {
    /// Its line.
    #[cfg_attr(not(feature = "bpf"), allow(dead_code))]
    pub fn line(self) -> serde_json::Result<String> {
        let (version, reply) = (VERSION, self);
        Ok(serde_json::to_string(&PolicyReply { version, reply })? + "\n")
    }
}

#[cfg(test)]
mod tests {
    //! Promises: a call is read as it was written; what is none has one line; a name is plain.
    use super::*;

    #[test]
    fn calls_are_read_as_written() {
        let load = PolicyVerb::Load {
            name: "night".to_owned(),
            bytes: 7,
            trial: true,
        };
        for call in [load, PolicyVerb::Reset, PolicyVerb::Show] {
            let line = call.clone().line().unwrap();
            assert!(line.ends_with('\n'));
            assert_eq!(PolicyVerb::read(line.as_bytes()), Ok(call));
        }
        for line in [
            "",
            "{}",
            "{\"version\":2,\"call\":\"show\"}",
            "{\"version\":1,\"call\":\"load\"}",
            "{\"version\":1,\"call\":{\"load\":{\"name\":\"x\",\"bytes\":-1,\"trial\":true}}}",
        ] {
            let why = PolicyVerb::read(line.as_bytes()).unwrap_err();
            assert!(why.contains("not a call") && !why.contains('\n'), "{why}");
        }
    }

    #[test]
    fn names_are_plain() {
        let long = "x".repeat(NAME);
        for (name, right) in [
            ("night-2", true),
            ("", false),
            ("a b", false),
            ("\u{1b}[2J", false),
            (&long, false),
            (&long[1..], true),
        ] {
            assert_eq!(is_name(name), right, "{name}");
        }
    }
}

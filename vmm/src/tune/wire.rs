// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a program and a VMM send each other: lines of JSON, each with the version of this form.

use std::{str::FromStr, time::Duration};

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The version of the form.
pub const VERSION: u32 = 1;
/// More than a line has bytes.
pub const LINE: usize = 4096;

/// A line to a VMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TuneCall {
    pub version: u32,
    pub call: TuneVerb,
}

/// What the VMM is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum TuneVerb {
    /// Sets a floor or a ceiling, kHz, of the domain of a vCPU.
    Tune {
        vcpu: u16,
        floor_khz: Option<u32>,
        ceiling_khz: Option<u32>,
        for_ms: u64,
    },
    /// Has what was set last for so long from now on.
    Retune { handle: u64, for_ms: u64 },
    /// Ends it.
    Untune { handle: u64 },
}

/// A line from a VMM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TuneReply {
    pub version: u32,
    pub reply: TuneAnswer,
}

/// What has become of a call; or that what was set over this connection has ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TuneAnswer {
    /// It is done.
    Handle(u64),
    /// It is not, and nothing has changed.
    Error(String),
    /// No longer in force, by its time or by another connection's call.
    Ended(u64),
}

impl TuneVerb {
    /// The call in a line.
    ///
    /// # Errors
    /// Why it is none, in one line.
    pub fn read(line: &[u8]) -> Result<Self, String> {
        let wrong = |error: serde_json::Error| format!("column {}: no call", error.column());
        let value: Value = serde_json::from_slice(line).map_err(wrong)?;
        let version = value.get("version").and_then(Value::as_u64);
        if version != Some(VERSION.into()) {
            return Err(format!("this VMM takes calls of version {VERSION} alone"));
        }
        let call = TuneCall::deserialize(value);
        call.map(|call| call.call)
            .map_err(|_| "not a call; send tune, retune or untune with its fields".to_owned())
    }

    /// Its line.
    pub fn line(self) -> serde_json::Result<String> {
        let version = VERSION;
        Ok(serde_json::to_string(&TuneCall {
            version,
            call: self,
        })? + "\n")
    }
}

impl TuneAnswer {
    /// Its line.
    pub fn line(self) -> serde_json::Result<String> {
        let version = VERSION;
        Ok(serde_json::to_string(&TuneReply {
            version,
            reply: self,
        })? + "\n")
    }
}

/// A time as a user writes it: `200ms` or `5s`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lasts(pub Duration);

impl FromStr for Lasts {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (digits, of) = match text.strip_suffix("ms") {
            Some(digits) => (digits, Duration::from_millis as fn(u64) -> Duration),
            None => (
                text.strip_suffix('s').unwrap_or(""),
                Duration::from_secs as fn(u64) -> Duration,
            ),
        };
        let number = digits.parse::<u32>();
        number.map_or_else(
            |_| Err(format!("'{text}' is no time; write 200ms or 5s")),
            |number| Ok(Self(of(number.into()))),
        )
    }
}

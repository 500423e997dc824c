// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What libbpf and the kernel's verifier say, which libbpf prints: kept for the error, and off
//! stderr.

#![forbid(unsafe_code)]

use std::path::Path;
use std::sync::{Mutex, PoisonError};

use libbpf_rs::{ObjectBuilder, PrintLevel, set_print};

use crate::cause::reason;
use crate::error::BpfError;

/// One at a time: libbpf's way to print is the process's.
static LOADING: Mutex<()> = Mutex::new(());
static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());
/// A verifier's log can be long; its end tells.
const KEPT: usize = 64;

/// Does what may be refused; the error has the reason in it, on one line.
pub(crate) fn explained<T>(
    what: &'static str,
    work: impl FnOnce() -> libbpf_rs::Result<T>,
) -> Result<T, BpfError> {
    let _one = LOADING.lock().unwrap_or_else(PoisonError::into_inner);
    lines().clear();
    let before = set_print(Some((PrintLevel::Warn, keep)));
    let result = work();
    set_print(before);
    result.map_err(|error| BpfError::Refused {
        what,
        why: match reason(&lines()) {
            Some(reason) => format!("{error:#}: {reason}"),
            None => format!("{error:#}"),
        },
    })
}

/// Whether the running kernel takes the programs of an object file; none of them is attached.
///
/// # Errors
/// What is wrong with the file, or what the kernel said.
pub fn verify(object: &Path) -> Result<(), BpfError> {
    let wrong = |why: String| BpfError::Object {
        path: object.to_path_buf(),
        why,
    };
    let bytes = std::fs::read(object).map_err(|error| wrong(error.to_string()))?;
    let open = ObjectBuilder::default().open_memory(&bytes);
    let open = open.map_err(|error| wrong(format!("{error:#}")))?;
    explained("loading the BPF programs", || open.load()).map(drop)
}

fn lines() -> std::sync::MutexGuard<'static, Vec<String>> {
    LINES.lock().unwrap_or_else(PoisonError::into_inner)
}

fn keep(_level: PrintLevel, text: String) {
    let mut kept = lines();
    kept.extend(text.lines().map(str::to_owned));
    let over = kept.len().saturating_sub(KEPT);
    kept.drain(..over);
}

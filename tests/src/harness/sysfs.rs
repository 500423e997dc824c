// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Small files of the kernel's.

use std::fs;
use std::path::Path;
use std::str::FromStr;

use anyhow::{Context, Result, anyhow};
use vcpufreq_host::proc_field;

/// Folder of the cpufreq policies.
pub const CPUFREQ: &str = "/sys/devices/system/cpu/cpufreq";

/// A file's text, trimmed.
pub fn text(path: impl AsRef<Path>) -> Result<String> {
    let path = path.as_ref();
    let text = fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    Ok(text.trim().to_owned())
}

/// A file's number.
pub fn number<T: FromStr>(path: impl AsRef<Path>) -> Result<T> {
    let path = path.as_ref();
    let text = text(path)?;
    text.parse()
        .map_err(|_| anyhow!("{} holds '{text}', not a number", path.display()))
}

/// The number of a line `name: number` of a file, without its unit.
pub fn field<T: FromStr>(path: impl AsRef<Path>, name: &str) -> Result<T> {
    let path = path.as_ref();
    let text = text(path)?;
    let number = proc_field(&text, name).and_then(|text| text.split(' ').next()?.parse().ok());
    number.with_context(|| format!("{} has no number {name}", path.display()))
}

/// A file's numbers, separated by white space.
pub fn numbers<T: FromStr>(path: impl AsRef<Path>) -> Result<Vec<T>> {
    let path = path.as_ref();
    text(path)?
        .split_whitespace()
        .map(|word| {
            word.parse()
                .map_err(|_| anyhow!("{} holds '{word}'", path.display()))
        })
        .collect()
}

/// For how long a process or thread, by its folder in procfs, has run and has waited for a CPU, in ns.
pub fn ran_and_waited_ns(folder: &str) -> Result<(u64, u64)> {
    let numbers = numbers(format!("{folder}/schedstat"))?;
    let (ran, waited) = numbers
        .first()
        .zip(numbers.get(1))
        .context("schedstat is short")?;
    Ok((*ran, *waited))
}

/// Writes a value.
pub fn write(path: impl AsRef<Path>, value: impl ToString) -> Result<()> {
    let (path, value) = (path.as_ref(), value.to_string());
    fs::write(path, &value).with_context(|| format!("writing '{value}' to {}", path.display()))
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Where the XML of a domain comes from: libvirt, by virsh, or a file.

use std::{
    fs::File,
    io::{self, Read},
    process::{Command, Stdio},
};

use anyhow::{Context, bail};

use crate::message::printable;

/// The longest XML, in bytes.
const LONGEST: u64 = 4 << 20;

/// The XML of a domain: of the file `name`, if that has a `/` or ends in `.xml`, else of libvirt's
/// domain of this name, as it will start.
///
/// # Errors
/// In one line, with what to do: virsh can't be run or knows no such domain; the file can't be read;
/// the text is too long or not UTF-8.
pub fn read(name: &str) -> anyhow::Result<String> {
    let text = match name.contains('/') || name.ends_with(".xml") {
        true => of_file(name)?,
        false => of_libvirt("virsh", name)?,
    };
    String::from_utf8(text).ok().context("it is not UTF-8")
}

fn of_file(path: &str) -> anyhow::Result<Vec<u8>> {
    let file =
        File::open(path).context("it can't be read; check the path, or give a domain's name")?;
    if !file.metadata()?.is_file() {
        bail!("it is no file; give the path of a domain's XML, or a domain's name");
    }
    bounded(file)
}

fn of_libvirt(virsh: &str, name: &str) -> anyhow::Result<Vec<u8>> {
    let mut command = Command::new(virsh);
    command.args(["--readonly", "dumpxml", "--inactive"]);
    command.arg(format!("--domain={name}"));
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = command.stderr(Stdio::piped()).spawn().context(
        "virsh can't be run; install libvirt's clients, or give the path of the domain's XML",
    )?;
    let text = child.stdout.take().map_or_else(|| Ok(Vec::new()), bounded);
    if text.is_err() {
        // Else it would wait for its output to be read.
        drop(child.kill());
    }
    let mut said = String::new();
    let stderr = child.stderr.take().context("virsh has no stderr")?;
    let read = stderr.take(LONGEST).read_to_string(&mut said);
    let status = child.wait()?;
    let text = text?;
    if !status.success() {
        let said = said.lines().map(str::trim).find(|line| !line.is_empty());
        let said = read.ok().and(said).unwrap_or("it said nothing");
        bail!("virsh: {}; see virsh list --all", printable(said));
    }
    Ok(text)
}

fn bounded(source: impl Read) -> anyhow::Result<Vec<u8>> {
    let mut text = Vec::new();
    let read = source.take(LONGEST + 1).read_to_end(&mut text);
    read.context("it can't be read")?;
    match text.len() as u64 > LONGEST {
        true => Err(io::Error::from(io::ErrorKind::FileTooLarge))
            .context("no domain's XML has more than 4 MiB"),
        false => Ok(text),
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Facts that are read and never changed: the machine, its firmware, and its boot.

use miniz_oxide::inflate;
use vcpufreq_host::CpuList;

use super::{CPU, Sheet, UnitContext, boot};
use vcpufreq_host::undo::Unread;

use crate::{finding::Finding, profile::module_option};

/// More than any kernel's configuration, whose text is some 300 KiB.
const LONGEST_CONFIG: usize = 16 << 20;
/// There with CONFIG_IKCONFIG_PROC.
const OWN_CONFIG: &str = "/proc/config.gz";

/// All findings about the host.
pub(super) fn look(cx: &UnitContext, sheet: &mut Sheet) {
    kernel(cx, sheet);
    kernel_config(cx, sheet);
    siblings(cx, sheet);
    swap(cx, sheet);
    module_options(cx, sheet);
    for text in &cx.profile.firmware {
        sheet.finding(Finding::Firmware(text.clone()));
    }
}

fn kernel(cx: &UnitContext, sheet: &mut Sheet) {
    match cx.look.read("/proc/version") {
        Ok(text) if text.contains("PREEMPT_RT") => {}
        Ok(_) => sheet.finding(Finding::Reboot(
            "this kernel is not PREEMPT_RT: latencies have no bound; boot one that is".to_owned(),
        )),
        Err(why) => sheet.cannot("/proc/version".to_owned(), why),
    }
}

/// The options that the profile names, and those that its command line needs.
fn kernel_config(cx: &UnitContext, sheet: &mut Sheet) {
    let (named, needed) = (&cx.profile.kernel_config, boot::needed(cx));
    if named.is_empty() && needed.is_empty() {
        return;
    }
    // The words show elsewhere whether they are in force.
    let Some(text) = running_config(cx, sheet, !named.is_empty()) else {
        return;
    };
    let lacks = |option: &str| {
        !text
            .lines()
            .any(|line| line == format!("CONFIG_{option}=y"))
    };
    for (option, word) in needed.iter().filter(|(option, _)| lacks(option)) {
        sheet.finding(Finding::Reboot(format!(
            "this kernel lacks CONFIG_{option}, without which {word} on the command line does nothing; boot one that has it"
        )));
    }
    for option in named.iter().filter(|option| lacks(option)) {
        if needed.iter().all(|(of, _)| of != option) {
            sheet.finding(Finding::Reboot(format!(
                "this kernel lacks CONFIG_{option}; boot one that has it"
            )));
        }
    }
}

/// The running kernel's configuration. One that is `needed` and can't be read is unseen.
fn running_config(cx: &UnitContext, sheet: &mut Sheet, needed: bool) -> Option<String> {
    let release = cx.look.read("/proc/sys/kernel/osrelease");
    let path = format!("/boot/config-{}", release.unwrap_or_default());
    let own = || gunzip(&cx.look.bytes(OWN_CONFIG).ok()?);
    match cx.look.read(&path).or_else(|why| own().ok_or(why)) {
        Ok(text) => return Some(text),
        Err(_) if !needed => {}
        Err(Unread::Missing) => sheet.unseen(
            path,
            "the kernel's configuration is neither there nor in /proc/config.gz",
        ),
        Err(why) => sheet.cannot(path, why),
    }
    None
}

/// The text of a file that gzip made (RFC 1952), as the kernel's build does: without any field between
/// header and data. `None` for any other file.
fn gunzip(bytes: &[u8]) -> Option<String> {
    const MAGIC: [u8; 3] = [0x1f, 0x8b, 8];
    const MORE: u8 = 0b1_1110;
    const HEADER: usize = 10;
    let (header, data) = bytes.split_at_checked(HEADER)?;
    if header[..3] != MAGIC || header[3] & MORE != 0 {
        return None;
    }
    let text = inflate::decompress_to_vec_with_limit(data, LONGEST_CONFIG).ok()?;
    String::from_utf8(text).ok()
}

/// Two threads of a core take turns on its execution units.
fn siblings(cx: &UnitContext, sheet: &mut Sheet) {
    for cpu in cx.rt.iter() {
        let path = format!("{CPU}/cpu{cpu}/topology/thread_siblings_list");
        let Ok(text) = cx.look.read(&path) else {
            continue;
        };
        let core: CpuList = text.parse().unwrap_or_default();
        let others = core.without(&[cpu].into_iter().collect()).and(&cx.online);
        let Some(first) = others.iter().next() else {
            continue;
        };
        // A pair of real-time CPUs is one finding.
        if others.and(&cx.rt).iter().any(|other| other < cpu) {
            continue;
        }
        let whose = match others.and(&cx.rt).is_empty() {
            true => "",
            false => ", real-time as well: no guest's latency is its own",
        };
        sheet.finding(Finding::Hand(format!(
            "CPU {others} is a hyperthread of real-time CPU {cpu}'s core{whose}: switch hyperthreading off in the firmware, boot with nosmt, or write 0 to {CPU}/cpu{first}/online"
        )));
    }
}

fn swap(cx: &UnitContext, sheet: &mut Sheet) {
    let used = cx
        .look
        .read("/proc/swaps")
        .is_ok_and(|text| text.lines().count() > 1);
    if used {
        sheet.finding(Finding::Hand(
            "swap is on: memory that isn't locked can be written out; swapoff -a".to_owned(),
        ));
    }
}

/// Parameters that a module takes only when it is loaded. A module that is not loaded, and a
/// parameter that this kernel's module doesn't have, is no finding.
fn module_options(cx: &UnitContext, sheet: &mut Sheet) {
    let options = cx.profile.module_options.iter();
    for (module, name, value) in options.filter_map(|option| module_option(option)) {
        let path = format!("/sys/module/{module}/parameters/{name}");
        match cx.look.read(&path) {
            Ok(now) if now != value => sheet.finding(Finding::Hand(format!(
                "{path} is {now}: load {module} with {name}={value}, or boot with {module}.{name}={value}"
            ))),
            Ok(_) | Err(Unread::Missing) => {}
            Err(why) => sheet.cannot(path, why),
        }
    }
}

#[cfg(test)]
mod tests {
    //! Promise: what gzip made comes out, and anything else is none of it.
    use super::*;

    #[test]
    fn what_gzip_made() {
        // printf 'A=y\\n' | gzip -n
        let bytes = [
            0x1f, 0x8b, 0x08, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x03, 0x73, 0xb4, 0xad, 0xe4,
            0x02, 0x00, 0x26, 0xbd, 0x77, 0x30, 0x04, 0x00, 0x00, 0x00,
        ];
        assert_eq!(gunzip(&bytes).as_deref(), Some("A=y\n"));
        for cut in 0..bytes.len() - 9 {
            assert_eq!(gunzip(&bytes[..cut]), None, "{cut}");
        }
        assert_eq!(gunzip(b"CONFIG_A=y and so on"), None);
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! crosvm in place of vcpufreq: how it is started with the lab's guest, and what it names threads.

use std::process::Command;

/// Where the host has it, if it was given one.
pub const PROGRAM: &str = "/bin/crosvm";

/// Runs the guest, whose kernel is `ioeventfd`; it adds the console to the command line itself.
pub fn command(kernel: [&str; 2], mem_mib: u32, cmdline: &str, options: &[String]) -> Command {
    let [kernel, initrd] = kernel;
    let cmdline = cmdline.trim_start_matches("console=ttyS0 ");
    let mut command = Command::new(PROGRAM);
    command
        .args(["run", "--disable-sandbox", "--mem", &mem_mib.to_string()])
        .args(["--initrd", initrd, "-p", cmdline, "--serial"])
        .arg("type=stdout,hardware=serial,num=1,console,stdin")
        .args(options)
        .arg(kernel);
    command
}

/// `vcpu0`, by the name of a vCPU's thread under either VMM; none of another thread's.
pub fn vcpu_name(thread: &str) -> Option<&str> {
    let name = thread.strip_prefix("crosvm_").unwrap_or(thread);
    name.starts_with("vcpu").then_some(name)
}

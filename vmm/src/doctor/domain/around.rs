// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a domain's XML is compared with: the host's CPUs, what `vcpufreq rt apply` has set, and the
//! options of the domain's server.

use clap::{Args, Command, FromArgMatches};
use vcpufreq_host::undo::KernelHost;
use vcpufreq_host::{CpuList, HostCpus, HostRoot};

use crate::{
    config::served_vm::ServedVmConfig,
    message::{chain, usage},
    options::{file, serve::ServeArgs},
    rt_guest::{PartitionArgs, Record, Wanted},
};

/// What the hook of libvirt applies for real-time domains.
pub const HOST_FILE: &str = "/etc/vcpufreq-rt.toml";
const HOOK: &str = "/etc/libvirt/hooks/qemu.d/vcpufreq";

/// What is around a domain.
#[derive(Debug)]
pub struct AroundDomain {
    /// The host's architecture, as Rust names it.
    pub arch: String,
    pub online: CpuList,
    /// By the command line: isolcpus.
    pub isolated: CpuList,
    /// What was applied, or why that is unknown.
    pub applied: Result<Option<Record>, String>,
    /// What the hook applies, if it is installed and does so; or why it can't.
    pub hook: Result<Option<Wanted>, String>,
    /// Where the server's options are.
    pub options_file: String,
    /// The options; none without the file; or what is wrong with it.
    pub server: Result<Option<ServeArgs>, String>,
    /// Whether the device tree is there, or what the hook makes it of.
    pub has_tree: bool,
}

impl AroundDomain {
    /// Of the domain `name` with the device tree `dtb`, on the host below `root`.
    pub fn read(root: &HostRoot, arch: &str, name: &str, dtb: Option<&str>) -> Self {
        let isolated = root.text("sys/devices/system/cpu/isolated");
        let kernel = KernelHost::from(root);
        let of_this_boot = |record: Record| match record.is_of_another_boot(&kernel) {
            Ok(true) => Ok(None),
            Ok(false) => Ok(Some(record)),
            Err(error) => Err(error),
        };
        let applied = Record::read(&kernel);
        let applied = applied.and_then(|found| found.map_or(Ok(None), of_this_boot));
        let is_there = |path: String| root.path(path).exists();
        // systemd makes a path of the instance's name: one with a slash has no such file.
        let options_file = format!("/etc/vcpufreq/{name}.toml");
        Self {
            arch: arch.to_owned(),
            online: HostCpus::read(root).online(),
            isolated: isolated
                .and_then(|list| list.parse().ok())
                .unwrap_or_default(),
            hook: match [HOOK, HOST_FILE]
                .iter()
                .all(|path| is_there((*path).to_owned()))
            {
                true => by_hook(root, &kernel).map(Some),
                false => Ok(None),
            },
            applied: applied.map_err(|error| error.to_string()),
            server: match name.contains('/') {
                true => Ok(None),
                false => server_options(root, &options_file),
            },
            options_file,
            has_tree: dtb
                .is_none_or(|dtb| is_there(dtb.to_owned()) || is_there(format!("{dtb}.base"))),
        }
    }
}

/// What `vcpufreq rt apply --config HOST_FILE` makes of this host.
fn by_hook(root: &HostRoot, kernel: &KernelHost) -> Result<Wanted, String> {
    let args = PartitionArgs {
        config: Some(root.path(HOST_FILE)),
        ..PartitionArgs::default()
    };
    args.wanted(kernel).map_err(|error| chain(&error))
}

/// The options that `vcpufreq serve --config PATH` takes, and starts with as far as they and this host's
/// CPUs tell: whether it may load programs, its own rights decide.
fn server_options(root: &HostRoot, path: &str) -> Result<Option<ServeArgs>, String> {
    let path = &root.path(path);
    if !path.exists() {
        return Ok(None);
    }
    let flags = file::read(path).map_err(|error| chain(&error))?;
    let command = ServeArgs::augment_args(Command::new("serve").no_binary_name(true));
    let taken: Vec<_> = command
        .get_arguments()
        .filter_map(clap::Arg::get_long)
        .collect();
    let flags = flags
        .iter()
        .filter(|flag| taken.contains(&flag.name.as_str()));
    let flags: Vec<_> = flags.map(|flag| flag.text.clone()).collect();
    let matches = command.try_get_matches_from(flags);
    let options = matches.and_then(|matches| ServeArgs::from_arg_matches(&matches));
    let options = options.map_err(|error| usage(&error))?;
    let checked = options.listen.check();
    let checked = checked.and_then(|()| options.served.check());
    let served = checked.and_then(|()| ServedVmConfig::check(&options.served, root));
    served.map_err(|error| chain(&error))?;
    Ok(Some(options))
}

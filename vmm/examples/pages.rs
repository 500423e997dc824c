// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Writes a manual page for each command, and the completions for bash, fish and zsh, into a
//! folder, for packages:
//!
//! ```sh
//! cargo run -p vcpufreq --no-default-features --example pages -- FOLDER
//! ```
//!
//! An example, and no hidden command: a package for another machine makes them on this one, and
//! the program has no code for it.

use std::path::Path;
use std::sync::LazyLock;
use std::{fs, io};

use clap::{Command, CommandFactory};
use clap_complete::Shell;
use clap_mangen::Man;
use vcpufreq::cli::Cli;

const VERSION: &str = env!("CARGO_PKG_VERSION");
/// Commands made of parts of this one borrow their names from it.
static ALL: LazyLock<Command> = LazyLock::new(Cli::command);

/// Writes `vcpufreq.1`, `vcpufreq-COMMAND.1`, `vcpufreq.bash`, `vcpufreq.fish` and `_vcpufreq`.
///
/// # Errors
/// What the folder refuses.
pub fn write(folder: &Path) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    for shell in [Shell::Bash, Shell::Fish, Shell::Zsh] {
        let mut command = shown(&ALL).version(VERSION);
        clap_complete::generate_to(shell, &mut command, "vcpufreq", folder)?;
    }
    let mut command = users_command().disable_help_subcommand(true);
    command.build();
    write_man(&command, folder)
}

/// What the completions need of a command and of those below it, without what `--help` hides: their
/// generators offer hidden options and commands too.
fn shown(command: &'static Command) -> Command {
    let args = command.get_arguments().filter(|arg| !arg.is_hide_set());
    let below = command.get_subcommands().filter(|one| !one.is_hide_set());
    Command::new(command.get_name())
        .about(command.get_about().cloned().unwrap_or_default())
        .args(args.cloned())
        .subcommands(below.map(shown))
}

/// The command line without its hidden commands; pages leave hidden options out themselves.
fn users_command() -> Command {
    let shown = ALL.get_subcommands().filter(|one| !one.is_hide_set());
    Command::new("vcpufreq")
        .version(VERSION)
        .about(ALL.get_about().cloned().unwrap_or_default())
        .after_help(ALL.get_after_help().cloned().unwrap_or_default())
        .subcommand_required(true)
        .subcommands(shown.cloned())
}

fn write_man(command: &Command, folder: &Path) -> io::Result<()> {
    let shown = command.get_subcommands().filter(|one| !one.is_hide_set());
    for below in shown {
        write_man(below, folder)?;
    }
    let man = Man::new(command.clone());
    let man = man.source(format!("vcpufreq {VERSION}"));
    man.generate_to(folder).map(drop)
}

#[allow(dead_code)]
fn main() -> io::Result<()> {
    let folder = std::env::args_os().nth(1);
    let folder = folder.ok_or_else(|| io::Error::other("name the folder for the pages"))?;
    write(Path::new(&folder))
}

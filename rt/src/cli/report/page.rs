// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The page's file. It is made before hours of measuring, so that a path that can't be written is
//! an error at once, and removed if there is no report.

use std::{
    fs::{self, File},
    io::Write as _,
    path::{Path, PathBuf},
};

use anyhow::Context as _;

/// A file that will have the page.
#[derive(Debug)]
pub(super) struct Page {
    path: PathBuf,
    file: File,
    /// There was no file before.
    is_new: bool,
}

impl Page {
    pub(super) fn at(path: &Path) -> anyhow::Result<Self> {
        let is_new = !path.exists();
        // What is there stays until there is something new.
        let file = File::options()
            .write(true)
            .create(true)
            .truncate(false)
            .open(path);
        let file = file.with_context(|| cannot(path))?;
        let path = path.to_owned();
        Ok(Self { path, file, is_new })
    }

    pub(super) fn write(mut self, text: &str) -> anyhow::Result<()> {
        let written = self
            .file
            .set_len(0)
            .and_then(|()| self.file.write_all(text.as_bytes()));
        written.with_context(|| cannot(&self.path))?;
        self.is_new = false;
        Ok(())
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        if self.is_new {
            // It may have been removed meanwhile.
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn cannot(path: &Path) -> String {
    format!("can't write {}; check the path", path.display())
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A file for a result. It has the result as a whole: a reader finds the old one or the new one. Root
//! may write one into a folder in which another user can make any file.

use std::{
    ffi::OsString,
    fs::{self, File},
    io::{self, Write as _},
    path::{Path, PathBuf},
    process,
};

use anyhow::{Context as _, ensure};

/// The file, which isn't there or is a regular one.
#[derive(Debug)]
pub(super) struct ResultFile(PathBuf);

impl ResultFile {
    /// Tries whether it can be written. What is there stays.
    ///
    /// # Errors
    /// When it can't be.
    pub(super) fn at(path: &Path) -> anyhow::Result<Self> {
        let file = Self(path.to_owned());
        file.check()?;
        let tried = file.make().and_then(|_| fs::remove_file(file.new_path()));
        tried.with_context(|| file.unwritable())?;
        Ok(file)
    }

    /// Writes it.
    ///
    /// # Errors
    /// When it can't be written; then what was there stays.
    pub(super) fn write(&self, text: &str) -> anyhow::Result<()> {
        self.check()?;
        let mut new = self.make().with_context(|| self.unwritable())?;
        let written = new.write_all(text.as_bytes());
        let written = written.and_then(|()| fs::rename(self.new_path(), &self.0));
        if written.is_err() {
            let _ = fs::remove_file(self.new_path());
        }
        written.with_context(|| self.unwritable())
    }

    /// A device or a link would be gone after the renaming.
    fn check(&self) -> anyhow::Result<()> {
        let name = self.0.display();
        match fs::symlink_metadata(&self.0) {
            Ok(there) => ensure!(
                there.is_file(),
                "{name} is no regular file; name one, or a path where nothing is"
            ),
            Err(why) if why.kind() == io::ErrorKind::NotFound => {}
            Err(why) => return Err(why).with_context(|| self.unwritable()),
        }
        Ok(())
    }

    /// The new file beside it. Whatever has its name already, a link too, is an error.
    fn make(&self) -> io::Result<File> {
        File::create_new(self.new_path())
    }

    fn new_path(&self) -> PathBuf {
        let mut path = self.0.clone().into_os_string();
        path.push(format!(".{}.new", process::id()));
        path.into()
    }

    fn unwritable(&self) -> String {
        format!("can't write {}; check the path", self.0.display())
    }
}

/// Checks that no two of these files are the same.
///
/// # Errors
/// When two are.
pub(super) fn check_different(paths: &[&Path]) -> anyhow::Result<()> {
    for (at, path) in paths.iter().enumerate() {
        let mut others = paths[..at].iter();
        ensure!(
            !others.any(|other| place(other) == place(path)),
            "{} is named twice; name another file",
            path.display()
        );
    }
    Ok(())
}

/// The folder as the kernel finds it, and the name there. A file that is there is itself.
fn place(path: &Path) -> (Option<PathBuf>, Option<OsString>) {
    if let Ok(there) = path.canonicalize() {
        return (Some(there), None);
    }
    let folder = path.parent().map(|folder| match folder == Path::new("") {
        true => Path::new("."),
        false => folder,
    });
    let folder = folder.map(|folder| folder.canonicalize().unwrap_or(folder.to_owned()));
    (folder, path.file_name().map(OsString::from))
}

#[cfg(test)]
mod tests {
    //! Promises: only a regular file is replaced, and a planted link isn't followed; what was there
    //! stays until there is a result; one path is one file, however it is written.
    use std::os::unix::fs::{FileTypeExt as _, symlink};

    use super::*;

    #[test]
    fn only_a_regular_file_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        fs::write(path("old"), "old").unwrap();
        let file = ResultFile::at(&path("old")).unwrap();
        assert_eq!(fs::read_to_string(path("old")).unwrap(), "old");
        file.write("new").unwrap();
        assert_eq!(fs::read_to_string(path("old")).unwrap(), "new");
        ResultFile::at(&path("none")).unwrap();
        assert_eq!(
            fs::read_dir(dir.path()).unwrap().count(),
            1,
            "it only tried"
        );
        symlink(path("old"), path("link")).unwrap();
        let socket = std::os::unix::net::UnixListener::bind(path("socket")).unwrap();
        for name in ["link", "socket", "."] {
            let why = ResultFile::at(&path(name)).unwrap_err().to_string();
            assert!(why.contains("is no regular file"), "{name}: {why}");
        }
        drop(socket);
        let there = fs::symlink_metadata(path("socket")).unwrap();
        assert!(there.file_type().is_socket());
        // It came to be between two writes.
        fs::remove_file(path("old")).unwrap();
        symlink(path("other"), path("old")).unwrap();
        assert!(file.write("newer").is_err());
    }

    #[test]
    fn a_planted_link_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        fs::write(path("victim"), "old").unwrap();
        let new = format!("report.{}.new", process::id());
        symlink(path("victim"), path(&new)).unwrap();
        assert!(ResultFile::at(&path("report")).is_err());
        assert!(ResultFile(path("report")).write("new").is_err());
        assert_eq!(fs::read_to_string(path("victim")).unwrap(), "old");
        assert!(path(&new).is_symlink(), "it is another's");
    }

    #[test]
    fn one_path_is_one_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        fs::create_dir(path("folder")).unwrap();
        fs::write(path("there"), "").unwrap();
        let same = |a: &str, b: &str| check_different(&[&path(a), &path(b)]).is_err();
        assert!(same("a", "a") && same("a", "folder/../a") && same("there", "./there"));
        assert!(!same("a", "b") && !same("a", "folder/a"));
        assert!(check_different(&[Path::new("x"), Path::new("./x")]).is_err());
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Which modules of a crate use which others, read from the sources.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use syn::visit::{self, Visit};

/// A module's path below its crate's root, which is empty.
pub type Module = Vec<String>;
pub type Uses = BTreeMap<Module, BTreeSet<Module>>;

/// The modules below a folder, and which others each uses; not its own parts, nor what it is a
/// part of.
pub fn uses_of(sources: &Path) -> Uses {
    let mut uses = all_uses_of(sources);
    for (module, used) in &mut uses {
        used.retain(|used| !used.starts_with(module) && !module.starts_with(used));
    }
    uses
}

/// The modules below a folder, and which others each uses.
fn all_uses_of(sources: &Path) -> Uses {
    let files = modules(sources, &[]).into_iter().map(|(module, file)| {
        let text = fs::read_to_string(file).expect("a source");
        let mut paths = Paths::default();
        paths.visit_file(&syn::parse_file(&text).expect("Rust"));
        (module, paths)
    });
    let files: BTreeMap<Module, Paths> = files.collect();
    let uses = files.iter().map(|(module, paths)| {
        let used = paths.used.iter();
        let used = used.filter_map(|path| resolve(path, module, &files));
        (module.clone(), used.filter(|used| used != module).collect())
    });
    uses.collect()
}

/// The modules that use what a module above them defines, which itself uses a part of theirs.
pub fn cycles_with_parts(sources: &Path) -> Vec<String> {
    let uses = all_uses_of(sources);
    let mut found = Vec::new();
    for (part, used) in &uses {
        let above = used.iter().filter(|used| part.starts_with(used));
        for above in above {
            let branch = &part[..=above.len()];
            if uses[above].iter().any(|used| used.starts_with(branch)) {
                found.push(format!("{} and {}", above.join("::"), part.join("::")));
            }
        }
    }
    found
}

/// The files of the modules, but of those that are tests.
fn modules(folder: &Path, above: &[String]) -> BTreeMap<Module, PathBuf> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        let stem = path
            .file_stem()
            .and_then(|stem| stem.to_str())
            .expect("UTF-8");
        let mut module = above.to_vec();
        if path.is_dir() {
            module.push(stem.to_owned());
            found.extend(modules(&path, &module));
        } else if path.extension().is_some_and(|end| end == "rs") && !stem.ends_with("tests") {
            if !["lib", "main", "mod"].contains(&stem) {
                module.push(stem.to_owned());
            }
            found.insert(module, path);
        }
    }
    found
}

/// What a file names.
#[derive(Default)]
struct Paths {
    /// The paths of its uses, and those in its code.
    used: Vec<Vec<String>>,
    /// The names that it has from elsewhere and gives on, and their paths.
    given_on: BTreeMap<String, Vec<String>>,
}

impl Paths {
    fn add_tree(&mut self, before: &[String], tree: &syn::UseTree, gives_on: bool) {
        let with = |word: &syn::Ident| [before, &[word.to_string()]].concat();
        let (path, name) = match tree {
            syn::UseTree::Path(path) => {
                return self.add_tree(&with(&path.ident), &path.tree, gives_on);
            }
            syn::UseTree::Group(group) => {
                let items = group.items.iter();
                return items.for_each(|item| self.add_tree(before, item, gives_on));
            }
            syn::UseTree::Name(name) => (with(&name.ident), Some(&name.ident)),
            syn::UseTree::Rename(rename) => (with(&rename.ident), Some(&rename.rename)),
            syn::UseTree::Glob(_) => (before.to_vec(), None),
        };
        if let Some(name) = name.filter(|_| gives_on) {
            self.given_on.insert(name.to_string(), path.clone());
        }
        self.used.push(path);
    }
}

impl<'ast> Visit<'ast> for Paths {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        let test = |attribute: &syn::Attribute| {
            attribute.path().is_ident("cfg")
                && attribute
                    .parse_args::<syn::Ident>()
                    .is_ok_and(|word| word == "test")
        };
        if !item.attrs.iter().any(test) {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        let gives_on = !matches!(item.vis, syn::Visibility::Inherited);
        self.add_tree(&[], &item.tree, gives_on);
    }

    // Where a name is seen is no use of that module.
    fn visit_vis_restricted(&mut self, _: &'ast syn::VisRestricted) {}

    fn visit_path(&mut self, path: &'ast syn::Path) {
        // A word alone is a name of this file.
        if path.segments.len() > 1 {
            let words = path.segments.iter();
            let words = words.map(|segment| segment.ident.to_string());
            self.used.push(words.collect());
        }
        visit::visit_path(self, path);
    }

    // syn doesn't parse what a macro gets.
    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        let text = call.tokens.to_string().replace(" :: ", "::");
        let is_part = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
        let paths = text.split(|c| !is_part(c));
        let paths = paths.filter(|path| path.contains("::"));
        let words = |path: &str| path.split("::").map(str::to_owned).collect();
        self.used.extend(paths.map(words));
        visit::visit_macro(self, call);
    }
}

/// The deepest module that a path in the module `here` goes through, or that a name at its end
/// comes from.
fn resolve(path: &[String], here: &[String], files: &BTreeMap<Module, Paths>) -> Option<Module> {
    let ups = path.iter().take_while(|word| *word == "super").count();
    let full = match path.first()?.as_str() {
        "crate" => path[1..].to_vec(),
        "self" => [here, &path[1..]].concat(),
        "super" => [here.get(..here.len().checked_sub(ups)?)?, &path[ups..]].concat(),
        _ => [here, path].concat(),
    };
    let is_module = |length: &usize| files.contains_key(&full[..*length]);
    let length = (0..=full.len()).rev().find(is_module)?;
    let module = &full[..length];
    let name = full.get(length);
    let from = name.and_then(|name| files[module].given_on.get(name));
    // A name given on by itself, as a crate's own, comes from elsewhere.
    let from = from.filter(|from| module != here || *from != path);
    let deeper = from.and_then(|from| resolve(from, module, files));
    Some(deeper.unwrap_or_else(|| module.to_vec()))
}

/// The modules that use each other in a circle, among those of one folder.
pub fn cycles(uses: &Uses) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    let folders: BTreeSet<&[String]> = uses
        .keys()
        .filter_map(|module| Some(module.split_last()?.1))
        .collect();
    for folder in folders {
        // Of two modules, the parts in which they differ first below this folder.
        let mut arrows: BTreeMap<&String, BTreeSet<&String>> = BTreeMap::new();
        for (module, used) in uses {
            let below =
                |module: &'_ Module| module.starts_with(folder) && module.len() > folder.len();
            for other in used.iter().filter(|other| below(module) && below(other)) {
                let (from, to) = (&module[folder.len()], &other[folder.len()]);
                if from != to {
                    arrows.entry(from).or_default().insert(to);
                }
            }
        }
        let reached = |from: &String| {
            let mut seen = BTreeSet::new();
            let mut next: Vec<&String> = arrows.get(from).into_iter().flatten().copied().collect();
            while let Some(module) = next.pop() {
                if seen.insert(module) {
                    next.extend(arrows.get(module).into_iter().flatten().copied());
                }
            }
            seen
        };
        let circle: Vec<&String> = arrows
            .keys()
            .copied()
            .filter(|from| reached(from).contains(from))
            .collect();
        if !circle.is_empty() {
            let full = |name: &&String| [folder, &[(*name).clone()]].concat().join("::");
            found.push(circle.iter().map(full).collect());
        }
    }
    found
}

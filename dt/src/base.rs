// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The tree of another VMM, read from its flattened form. It is not trusted: what is read lies within
//! its block, and names and depth have a limit. Names and values stay where they are in the bytes.
//!
//! Read here, since no crate does it for this workspace's oldest compiler and without a panic.

use std::borrow::Cow;

use thiserror::Error;

/// The largest tree in bytes, without padding, that an arm64 kernel takes
/// (Linux' `MAX_FDT_SIZE`).
pub const MAX_TREE: usize = 2 << 20;
pub const MAGIC: u32 = 0xd00d_feed;
/// Of the flattened form, since 2005: that of Linux, QEMU and dtc.
pub const VERSION: u32 = 17;
/// As that, without the size of the structure in its header.
pub const OLDEST_VERSION: u32 = 16;
pub const BEGIN_NODE: u32 = 1;
pub const END_NODE: u32 = 2;
pub const PROPERTY: u32 = 3;
const NOP: u32 = 4;
pub const END: u32 = 9;
/// Linux leaves out what is deeper (`FDT_MAX_DEPTH`). The root has depth 1. Each level takes stack.
pub const MAX_DEPTH: usize = 63;
/// The longest property name. The specification has 31, which many boards' trees exceed; Linux makes
/// a file of each property, whose name has at most these (`NAME_MAX`).
const MAX_NAME: usize = 255;
/// How much of a path a message has.
const MAX_SHOWN: usize = 96;

/// Which rule of the flattened form a tree breaks, or which limit.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum TreeError {
    /// It is larger than [`MAX_TREE`].
    #[error("a tree of {size} bytes, Linux takes {MAX_TREE}")]
    TooLarge {
        /// Its size.
        size: usize,
    },
    /// Nodes are nested deeper than Linux takes them.
    #[error("{node} is nested deeper than {MAX_DEPTH}")]
    TooDeep {
        /// The end of its path.
        node: String,
    },
    /// It begins otherwise.
    #[error("it begins with {found:#010x}, not {MAGIC:#010x}")]
    Magic {
        /// The first word.
        found: u32,
    },
    /// It is of another version.
    #[error(
        "its version is {version}, and {oldest} for readers; {OLDEST_VERSION} and {VERSION} are read \
         here"
    )]
    Version {
        /// Its version.
        version: u32,
        /// The oldest version whose readers can read it.
        oldest: u32,
    },
    /// It has not all of a part.
    #[error("its {part} is not all within it")]
    Part {
        /// What the part is called.
        part: &'static str,
    },
    /// The structure has a tag where it can't be.
    #[error("{node}: tag {tag:#x} at byte {at} of its structure")]
    Tag {
        /// The end of the node's path.
        node: String,
        /// The tag.
        tag: u32,
        /// Its place.
        at: usize,
    },
    /// A node has a property behind a child node, where Linux doesn't see it.
    #[error("{node}: a property behind a child node, at byte {at} of its structure")]
    LateProperty {
        /// The end of the node's path.
        node: String,
        /// The property's place.
        at: usize,
    },
    /// The name of a node or a property has other characters than printable ASCII, or a wrong
    /// length.
    #[error(
        "{node}: no name of at most {MAX_NAME} printable characters, at byte {at} of its structure"
    )]
    Name {
        /// The end of the node's path; of a node without a name, its parent's.
        node: String,
        /// Where the name is, or is referred to.
        at: usize,
    },
}

const SHORT: TreeError = TreeError::Part { part: "structure" };

/// A whole tree.
pub struct Base<'a> {
    /// Addresses and sizes.
    pub reservations: Vec<(u64, u64)>,
    pub boot_cpu: u32,
    pub root: BaseNode<'a>,
}

/// A node with all below it.
#[derive(Clone)]
pub struct BaseNode<'a> {
    /// With its address; the root's is empty.
    pub name: Cow<'a, str>,
    pub properties: Vec<(&'a str, Cow<'a, [u8]>)>,
    pub children: Vec<BaseNode<'a>>,
}

impl<'a> Base<'a> {
    /// Reads `bytes` without what comes after the tree's stated size.
    pub fn read(bytes: &'a [u8]) -> Result<Self, TreeError> {
        let header = Header::read(bytes)?;
        let size = offset(header.size);
        if size > MAX_TREE {
            return Err(TreeError::TooLarge { size });
        }
        let bytes = part("size", bytes.get(..size))?;
        let mut structure = Structure {
            bytes: header.structure.slice(bytes, "structure")?,
            at: 0,
            strings: header.strings.slice(bytes, "strings")?,
            path: Vec::new(),
        };
        structure.tag(BEGIN_NODE)?;
        let root = structure.root()?;
        structure.tag(END)?;
        Ok(Self {
            reservations: part("reservations", reservations(bytes, header.reservations))?,
            boot_cpu: header.boot_cpu,
            root,
        })
    }
}

impl BaseNode<'_> {
    /// The value of the first property of this name.
    pub fn property(&self, name: &str) -> Option<&[u8]> {
        let mut properties = self.properties.iter();
        let found = properties.find(|(own, _)| *own == name);
        found.map(|(_, value)| value.as_ref())
    }

    /// The name without the address, by which Linux looks for nodes.
    pub fn base_name(&self) -> &str {
        self.name.split('@').next().unwrap_or_default()
    }
}

/// A node's path for a message: its end, if it is long.
pub fn shown(path: &[&str]) -> String {
    let path = format!("/{}", path.join("/"));
    match path.len().checked_sub(MAX_SHOWN) {
        // All of it is ASCII.
        Some(cut @ 1..) => format!("...{}", path.get(cut..).unwrap_or_default()),
        _ => path,
    }
}

/// A block's place, as the header has it.
struct Place {
    offset: u32,
    size: u32,
}

impl Place {
    fn slice<'a>(&self, bytes: &'a [u8], name: &'static str) -> Result<&'a [u8], TreeError> {
        let from = bytes.get(offset(self.offset)..);
        part(name, from.and_then(|from| from.get(..offset(self.size))))
    }
}

struct Header {
    size: u32,
    structure: Place,
    strings: Place,
    reservations: u32,
    boot_cpu: u32,
}

impl Header {
    /// Ten words, and what they must be.
    fn read(bytes: &[u8]) -> Result<Self, TreeError> {
        let word = |index: usize| part("header", word(bytes, index * 4));
        let magic = word(0)?;
        if magic != MAGIC {
            return Err(TreeError::Magic { found: magic });
        }
        let (version, oldest) = (word(5)?, word(6)?);
        if version < OLDEST_VERSION || oldest > VERSION {
            return Err(TreeError::Version { version, oldest });
        }
        let (size, structure) = (word(1)?, word(2)?);
        Ok(Self {
            size,
            structure: Place {
                offset: structure,
                size: match version {
                    OLDEST_VERSION => size.saturating_sub(structure),
                    _ => word(9)?,
                },
            },
            strings: Place {
                offset: word(3)?,
                size: word(8)?,
            },
            reservations: word(4)?,
            boot_cpu: word(7)?,
        })
    }
}

/// Pairs up to one of zeros. `None` if the tree ends before that.
fn reservations(bytes: &[u8], at: u32) -> Option<Vec<(u64, u64)>> {
    let mut reservations = Vec::new();
    for pair in bytes.get(offset(at)..)?.chunks_exact(16) {
        let (address, size) = pair.split_first_chunk()?;
        let size = size.try_into().ok()?;
        match (u64::from_be_bytes(*address), u64::from_be_bytes(size)) {
            (0, 0) => return Some(reservations),
            pair => reservations.push(pair),
        }
    }
    None
}

/// Reads the structure block from its begin to its end.
struct Structure<'a> {
    bytes: &'a [u8],
    at: usize,
    strings: &'a [u8],
    /// Of the node that is read, without the root.
    path: Vec<&'a str>,
}

impl<'a> Structure<'a> {
    /// The rest of the root, whose tag was read.
    fn root(&mut self) -> Result<BaseNode<'a>, TreeError> {
        let at = self.at;
        match self.node_name()? {
            "" => self.inside(""),
            _ => Err(self.no_name(at)),
        }
    }

    /// The rest of another node, whose tag was read.
    fn child(&mut self) -> Result<BaseNode<'a>, TreeError> {
        let at = self.at;
        let name = self.node_name()?;
        if name.is_empty() {
            return Err(self.no_name(at));
        }
        self.path.push(name);
        if self.path.len() >= MAX_DEPTH {
            return Err(TreeError::TooDeep {
                node: shown(&self.path),
            });
        }
        let node = self.inside(name);
        self.path.pop();
        node
    }

    fn node_name(&mut self) -> Result<&'a str, TreeError> {
        let name = name(self.bytes.get(self.at..)).ok_or_else(|| self.no_name(self.at))?;
        self.skip(name.len() + 1);
        Ok(name)
    }

    /// What a node has behind its name.
    fn inside(&mut self, name: &'a str) -> Result<BaseNode<'a>, TreeError> {
        let (mut properties, mut children) = (Vec::new(), Vec::new());
        loop {
            let at = self.at;
            match self.word()? {
                PROPERTY if children.is_empty() => properties.push(self.property()?),
                PROPERTY => {
                    let node = shown(&self.path);
                    return Err(TreeError::LateProperty { node, at });
                }
                BEGIN_NODE => children.push(self.child()?),
                END_NODE => break,
                NOP => {}
                tag => return Err(self.wrong(tag, at)),
            }
        }
        Ok(BaseNode {
            name: name.into(),
            properties,
            children,
        })
    }

    /// The rest of a property whose tag was read.
    fn property(&mut self) -> Result<(&'a str, Cow<'a, [u8]>), TreeError> {
        let len = offset(self.word()?);
        let at = self.at;
        let from = self.strings.get(offset(self.word()?)..);
        // A name that is looked at only so far: many properties may refer to one that is long.
        let from = from.map(|from| from.get(..=MAX_NAME).unwrap_or(from));
        let name = name(from).filter(|name| !name.is_empty());
        let name = name.ok_or_else(|| self.no_name(at))?;
        let value = self.bytes.get(self.at..).and_then(|rest| rest.get(..len));
        let value = value.ok_or(SHORT)?;
        self.skip(len);
        Ok((name, value.into()))
    }

    /// This tag.
    fn tag(&mut self, wanted: u32) -> Result<(), TreeError> {
        let at = self.at;
        match self.word()? {
            tag if tag == wanted => Ok(()),
            tag => Err(self.wrong(tag, at)),
        }
    }

    fn wrong(&self, tag: u32, at: usize) -> TreeError {
        let node = shown(&self.path);
        TreeError::Tag { node, tag, at }
    }

    fn no_name(&self, at: usize) -> TreeError {
        let node = shown(&self.path);
        TreeError::Name { node, at }
    }

    fn word(&mut self) -> Result<u32, TreeError> {
        let word = word(self.bytes, self.at).ok_or(SHORT)?;
        self.at += 4;
        Ok(word)
    }

    /// Passes what was seen to be there, and the padding behind it.
    fn skip(&mut self, len: usize) {
        self.at = (self.at + len).next_multiple_of(4);
    }
}

/// The text before the first zero. Only what can be printed in a line.
fn name(bytes: Option<&[u8]>) -> Option<&str> {
    let bytes = bytes?;
    let len = bytes.iter().position(|&byte| byte == 0)?;
    let name = std::str::from_utf8(&bytes[..len]).ok()?;
    name.bytes()
        .all(|byte| byte.is_ascii_graphic())
        .then_some(name)
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    let word = bytes.get(at..)?.first_chunk()?;
    Some(u32::from_be_bytes(*word))
}

fn offset(word: u32) -> usize {
    usize::try_from(word).unwrap_or(usize::MAX)
}

fn part<T>(name: &'static str, found: Option<T>) -> Result<T, TreeError> {
    found.ok_or(TreeError::Part { part: name })
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The tree of another VMM, read from its flattened form. It is not trusted: what is read lies within
//! its block, and names and depth have a limit. Names and values stay where they are in the bytes.
//!
//! Read here, since no crate does it for this workspace's oldest compiler and without a panic.

use thiserror::Error;

/// The largest tree in bytes, without padding, that an arm64 kernel takes
/// (Linux' `MAX_FDT_SIZE`).
pub const MAX_TREE: usize = 2 << 20;
const MAGIC: u32 = 0xd00d_feed;
/// Of the flattened form, since 2005: that of Linux, QEMU and dtc.
const VERSION: u32 = 17;
const BEGIN_NODE: u32 = 1;
const END_NODE: u32 = 2;
const PROPERTY: u32 = 3;
const NOP: u32 = 4;
const END: u32 = 9;
/// The root has depth 1, a core's thread in `/cpus/cpu-map` 7. Each level takes stack.
pub const MAX_DEPTH: usize = 16;
/// The longest property name of the specification; the writer takes no longer one.
const MAX_NAME: usize = 31;

/// Which rule of the flattened form a tree breaks, or which limit.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum TreeError {
    /// It is larger than [`MAX_TREE`].
    #[error("a tree of {size} bytes, Linux takes {MAX_TREE}")]
    TooLarge {
        /// Its size.
        size: usize,
    },
    /// Nodes are nested deeper than any machine's.
    #[error("nodes are nested deeper than {MAX_DEPTH}")]
    TooDeep,
    /// It begins otherwise.
    #[error("it begins with {found:#010x}, not {MAGIC:#010x}")]
    Magic {
        /// The first word.
        found: u32,
    },
    /// It is of another version.
    #[error("its version is {version}, and {oldest} for readers; {VERSION} is read here")]
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
    #[error("tag {tag:#x} at byte {at} of its structure")]
    Tag {
        /// The tag.
        tag: u32,
        /// Its place.
        at: usize,
    },
    /// A node's or a property's name is none.
    #[error("no name at byte {at} of its structure")]
    Name {
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
pub struct BaseNode<'a> {
    /// With its address; the root's is empty.
    pub name: &'a str,
    pub properties: Vec<(&'a str, &'a [u8])>,
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
            bytes: header.structure.of(bytes, "structure")?,
            at: 0,
            strings: header.strings.of(bytes, "strings")?,
        };
        structure.tag(BEGIN_NODE)?;
        let root = structure.node(1)?;
        structure.tag(END)?;
        Ok(Self {
            reservations: part("reservations", reservations(bytes, header.reservations))?,
            boot_cpu: header.boot_cpu,
            root,
        })
    }
}

impl<'a> BaseNode<'a> {
    /// The value of the first property of this name.
    pub fn property(&self, name: &str) -> Option<&'a [u8]> {
        let mut properties = self.properties.iter();
        properties.find(|(own, _)| *own == name).map(|pair| pair.1)
    }
}

/// A block's place, as the header has it.
struct Place {
    offset: u32,
    size: u32,
}

impl Place {
    fn of<'a>(&self, bytes: &'a [u8], name: &'static str) -> Result<&'a [u8], TreeError> {
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
        if !(oldest..=version).contains(&VERSION) {
            return Err(TreeError::Version { version, oldest });
        }
        let place = |offset, size| {
            let (offset, size) = (word(offset)?, word(size)?);
            Ok(Place { offset, size })
        };
        Ok(Self {
            size: word(1)?,
            structure: place(2, 9)?,
            strings: place(3, 8)?,
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
}

impl<'a> Structure<'a> {
    /// The rest of a node whose tag was read.
    fn node(&mut self, depth: usize) -> Result<BaseNode<'a>, TreeError> {
        if depth > MAX_DEPTH {
            return Err(TreeError::TooDeep);
        }
        let at = self.at;
        let name = name(self.bytes.get(at..)).ok_or(TreeError::Name { at })?;
        if name.is_empty() != (depth == 1) {
            return Err(TreeError::Name { at });
        }
        self.skip(name.len() + 1);
        let (mut properties, mut children) = (Vec::new(), Vec::new());
        loop {
            let at = self.at;
            match self.word()? {
                PROPERTY if children.is_empty() => properties.push(self.property()?),
                BEGIN_NODE => children.push(self.node(depth + 1)?),
                END_NODE => break,
                NOP => {}
                tag => return Err(TreeError::Tag { tag, at }),
            }
        }
        Ok(BaseNode {
            name,
            properties,
            children,
        })
    }

    /// The rest of a property whose tag was read.
    fn property(&mut self) -> Result<(&'a str, &'a [u8]), TreeError> {
        let len = offset(self.word()?);
        let at = self.at;
        let from = self.strings.get(offset(self.word()?)..);
        // A name that is looked at only so far: many properties may refer to one that is long.
        let from = from.map(|from| from.get(..=MAX_NAME).unwrap_or(from));
        let name = name(from).filter(|name| !name.is_empty());
        let name = name.ok_or(TreeError::Name { at })?;
        let value = self.bytes.get(self.at..).and_then(|rest| rest.get(..len));
        let value = value.ok_or(SHORT)?;
        self.skip(len);
        Ok((name, value))
    }

    /// This tag.
    fn tag(&mut self, wanted: u32) -> Result<(), TreeError> {
        let at = self.at;
        match self.word()? {
            tag if tag == wanted => Ok(()),
            tag => Err(TreeError::Tag { tag, at }),
        }
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

/// The text before the first zero. Only what can be printed in a line; the writer is stricter.
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

//! As little of an NBD client as tests need: one export, one request after the other, simple replies.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// Longer than anything takes.
const LATE: Duration = Duration::from_secs(60);

/// A connection to an export.
pub struct Nbd {
    stream: TcpStream,
    /// Bytes of the export.
    pub size: u64,
    /// What NBD calls transmission flags.
    pub flags: u16,
}

impl Nbd {
    /// Chooses an export; `None` when the server has none of this name, and so closes the connection.
    pub fn open(address: &str, name: &str) -> Option<Nbd> {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(LATE)).unwrap();
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting).unwrap();
        assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
        let ask = [&[0, 0, 0, 3], &b"IHAVEOPT"[..], &1u32.to_be_bytes(), &(name.len() as u32).to_be_bytes()].concat();
        stream.write_all(&[&ask[..], name.as_bytes()].concat()).unwrap();
        let mut about = [0; 10];
        stream.read_exact(&mut about).ok()?;
        let (size, flags) = about.split_at(8);
        let (size, flags) = (size.try_into().unwrap(), flags.try_into().unwrap());
        Some(Nbd { stream, size: u64::from_be_bytes(size), flags: u16::from_be_bytes(flags) })
    }

    /// One request; its error.
    fn ask(&mut self, kind: u16, offset: u64, length: usize, data: &[u8]) -> std::io::Result<u32> {
        let head = [&0x2560_9513u32.to_be_bytes()[..], &[0; 2], &kind.to_be_bytes(), b"a cookie"].concat();
        let tail = [&offset.to_be_bytes()[..], &(length as u32).to_be_bytes(), data].concat();
        self.stream.write_all(&[head, tail].concat())?;
        let mut reply = [0; 16];
        self.stream.read_exact(&mut reply)?;
        assert_eq!((&reply[..4], &reply[8..]), (&0x6744_6698u32.to_be_bytes()[..], &b"a cookie"[..]));
        Ok(u32::from_be_bytes(reply[4..8].try_into().unwrap()))
    }

    /// Reads; or the error, or the end of the connection.
    pub fn read(&mut self, offset: u64, length: usize) -> std::io::Result<Result<Vec<u8>, u32>> {
        let error = self.ask(0, offset, length, &[])?;
        let mut data = vec![0; if error == 0 { length } else { 0 }];
        self.stream.read_exact(&mut data)?;
        Ok(if error == 0 { Ok(data) } else { Err(error) })
    }

    /// Writes; the error, or 0.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> u32 {
        self.ask(1, offset, data.len(), data).unwrap()
    }
}

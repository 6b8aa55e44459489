//! The command line of `status`.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;
use sealblock_server::control::protocol::LogLevel;

use super::scrub::ServedName;
use super::values::level_before_server;

const HELP: &str = "\
Examples:
  sealblock status
  sealblock status 127.0.0.1:4420 --json
  sealblock status v --watch

The exit status is 0 if no problem is known, 1 if blocks are bad, and 4 if a copy or a path is missing or out of sync, requests
fail, or not everything could be checked. The command only shows what the server knows; `sealblock scrub` checks blocks.";

/// Arguments of `status`.
#[derive(Args, Debug)]
#[command(after_help = HELP)]
pub struct Status {
    /// The server: its process ID, an address that it listens on, its control socket, or anything that it serves.
    /// [default: all servers of this user and of root]
    #[arg(value_name = "SERVER")]
    pub server: Option<ServerName>,
    /// Control socket of the server. [default: the sockets of this user's servers]
    #[arg(long, value_name = "PATH", conflicts_with = "server")]
    pub control: Option<PathBuf>,
    /// Refresh every 2 s and show rates, until interrupted.
    #[arg(long)]
    pub watch: bool,
    /// Print one JSON object; with --watch, one line for each refresh.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `log`.
#[derive(Args, Debug)]
#[command(
    after_help = "Examples:\n  sealblock log debug\n  sealblock log warn 127.0.0.1:4420\n  sealblock log --json\n\n\
    The level stays in effect until it is changed or the server exits; a reload keeps it."
)]
pub struct Log {
    /// New level. [default: print the current level]
    #[arg(value_name = "LEVEL", value_parser = level_before_server())]
    pub level: Option<LogLevel>,
    /// The server: its process ID, an address that it listens on, its control socket, or anything that it serves.
    /// [default: the only server]
    #[arg(value_name = "SERVER")]
    pub server: Option<ServerName>,
    /// Control socket of the server. [default: the sockets of this user's servers]
    #[arg(long, value_name = "PATH", conflicts_with = "server")]
    pub control: Option<PathBuf>,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// A server, by what is known of it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ServerName {
    /// Its process.
    Process(u32),
    /// Where it listens.
    Address(SocketAddr),
    /// What it serves, or its control socket.
    Serving(ServedName),
}

impl FromStr for ServerName {
    type Err = String;

    fn from_str(text: &str) -> Result<ServerName, String> {
        let number = text.parse().map(ServerName::Process).ok();
        let address = || text.replace("localhost:", "127.0.0.1:").parse().map(ServerName::Address).ok();
        let serving = || text.parse().map(ServerName::Serving);
        number.or_else(address).map_or_else(serving, Ok)
    }
}

impl fmt::Display for ServerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ServerName::Process(pid) => write!(f, "process {pid}"),
            ServerName::Address(address) => address.fmt(f),
            ServerName::Serving(name) => name.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_have_several_names() {
        let name = |text: &str| text.parse::<ServerName>().unwrap();
        assert_eq!(name("4711"), ServerName::Process(4711));
        assert_eq!(name("localhost:4420"), ServerName::Address("127.0.0.1:4420".parse().unwrap()));
        assert_eq!(name("[::1]:4420"), ServerName::Address("[::1]:4420".parse().unwrap()));
        for text in ["v", "./4711", "/run/s.sock", "mem:4096", "nqn.2026-11.io.sealblock:v/1"] {
            assert!(matches!(name(text), ServerName::Serving(_)), "{text}");
        }
        assert!("mirror:a".parse::<ServerName>().is_err());
    }
}

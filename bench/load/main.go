// Command load is the benchmark's client and raw server, each a process of its own
// so that its work is not counted as a proxy's:
//
//	load rate      paced requests at a fixed rate, open loop
//	load churn     the same with a connection for each
//	load idle      many connections, each idle after one request
//	load flood     many connections that do what they can to be a burden
//	load download  counted streams of bytes from load source
//	load upload    the same, to it
//	load first     the time to the first byte of a server that speaks first
//	load source    server of load download and upload
//	load banner    server of load first
//	load relay     the least a proxy can do: bytes from one socket to another
//
// Every client prints one JSON object and exits with 1 when anything went wrong. It
// knows nothing of proxies: it dials what it is told.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"time"
)

func main() {
	if err := start(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "load:", err)
		os.Exit(1)
	}
}

func start(args []string) error {
	if len(args) == 0 {
		return fmt.Errorf("say which: rate, churn, idle, flood, download, upload, first, source, banner or relay")
	}
	fs := flag.NewFlagSet(args[0], flag.ContinueOnError)
	addr := fs.String("addr", "", "literal `ip:port` to dial, or to listen on")
	host := fs.String("host", "", "Host of the requests (default: addr)")
	dial := fs.String("dial", "", "relay: literal `ip:port` of the other half")
	n := fs.Int("n", 10_000, "idle, flood: connections")
	bytes := fs.Int64("bytes", 1e9, "download, upload: bytes, all streams together")
	streams := fs.Int("streams", 1, "download, upload: connections")
	qps := fs.Int("qps", 2000, "rate, churn: requests a second, all connections together")
	conns := fs.Int("conns", 16, "rate: connections; churn: the most at once")
	duration := fs.Duration("duration", 3*time.Second, "rate, churn: how long")
	if err := fs.Parse(args[1:]); err != nil {
		return err
	}
	to, err := netip.ParseAddrPort(*addr)
	if err != nil {
		return fmt.Errorf("-addr: %w", err)
	}
	if *host == "" {
		*host = *addr
	}
	head := "GET / HTTP/1.1\r\nHost: " + *host + "\r\nUser-Agent: load\r\n"
	request := []byte(head + "\r\n")
	var result any
	switch args[0] {
	case "rate", "churn":
		if *qps < 1 || *conns < 1 || *conns > 10_000 || *duration <= 0 || float64(*qps)*duration.Seconds() > 50e6 {
			return fmt.Errorf("%s: qps and duration must be positive (at most 50 million requests), conns 1 to 10000", args[0])
		}
		if args[0] == "churn" {
			result, err = churn(to, []byte(head+"Connection: close\r\n\r\n"), *qps, *conns, *duration)
			break
		}
		result, err = paced(to, request, *qps, *conns, *duration)
	case "idle":
		return idle(to, request, *n, os.Stdin, os.Stdout)
	case "flood":
		return flood(to, *host, *n, os.Stdin, os.Stdout)
	case "download", "upload":
		if *streams < 1 || *streams > 1000 || *bytes < int64(*streams) {
			return fmt.Errorf("%s: streams must be 1 to 1000, and each have a byte", args[0])
		}
		result, err = transfer(to, *bytes, *streams, args[0] == "upload")
	case "first":
		result, err = firstByte(to)
	case "source":
		return serve(to, source)
	case "banner":
		return serve(to, banner)
	case "relay":
		other, err := netip.ParseAddrPort(*dial)
		if err != nil || !other.Addr().Is4() || !to.Addr().Is4() {
			return fmt.Errorf("relay: -addr and -dial must be IPv4 addresses with a port, not %q and %q", *addr, *dial)
		}
		return relay(to, other)
	default:
		return fmt.Errorf("%q is none of rate, churn, idle, flood, download, upload, first, source, banner, relay", args[0])
	}
	if err != nil {
		return fmt.Errorf("%s: %w", args[0], err)
	}
	return json.NewEncoder(os.Stdout).Encode(result)
}

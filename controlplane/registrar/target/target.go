// Package target says where registrars are: what users write, and the addresses behind it.
//
//   - Registrars serve alike, so every address that a name has is one of them.
//   - Their order differs from node to node and from time to time, so that not all nodes
//     come to the same one.
//
// It connects to nothing but DNS.
package target

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"strconv"
	"strings"
)

// maxAddrs is how many addresses are given; those beyond have their turn when DNS is asked again.
const maxAddrs = 64

// Check says what is wrong with "host:port"; nil: nothing.
func Check(t string) error {
	_, _, err := split(t)
	return err
}

func split(t string) (host, port string, err error) {
	host, port, err = net.SplitHostPort(t)
	if err == nil {
		if n, perr := strconv.ParseUint(port, 10, 16); host == "" || perr != nil || n == 0 {
			err = errors.New("no host or no port")
		}
	}
	if err != nil {
		return "", "", fmt.Errorf("registrar %q: write <host>:<port>, such as aether-registrar.aether-system:8443", t)
	}
	return host, port, nil
}

// Lookup gives the addresses of a host name; DNS is one.
type Lookup func(ctx context.Context, host string) ([]string, error)

// DNS is the Lookup of this host's resolver.
func DNS(ctx context.Context, host string) ([]string, error) {
	return net.DefaultResolver.LookupHost(ctx, host)
}

// Resolve gives the addresses of targets ("host:port"), each once, in an order of its own.
// A name that has none is left out while another one has; an error: nowhere is known.
func Resolve(ctx context.Context, targets []string, lookup Lookup) ([]string, error) {
	var out []string
	var errs []error
	for _, t := range targets {
		host, port, err := split(t)
		if err != nil {
			return nil, err
		}
		if net.ParseIP(host) != nil {
			out = append(out, net.JoinHostPort(host, port))
			continue
		}
		ips, err := lookup(ctx, host)
		if err != nil {
			errs = append(errs, fmt.Errorf("registrar %s: %w", t, err))
		}
		for _, ip := range ips {
			out = append(out, net.JoinHostPort(ip, port))
		}
	}
	slices.Sort(out)
	out = slices.Compact(out)
	rand.Shuffle(len(out), func(i, j int) { out[i], out[j] = out[j], out[i] })
	if len(out) == 0 {
		if len(errs) == 0 {
			errs = append(errs, fmt.Errorf("registrar %s: the name has no address", strings.Join(targets, ", ")))
		}
		return nil, errors.Join(errs...)
	}
	return out[:min(len(out), maxAddrs)], nil
}

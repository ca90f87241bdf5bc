package faults

import (
	"fmt"
	"sync"

	"google.golang.org/protobuf/proto"

	"aether/controlplane/registrar/server/storetest"
)

// badRows: thousands of keys and rows that are none come into etcd, a good one among them and
// one after them. The good ones are known, and requests go on.
func badRows(w *world) {
	const bad, writers = 2000, 8
	var names, first, both []int
	for node := range w.Rig.Nodes {
		s, err := w.registrarOf(w.ctx, node)
		w.must(err)
		names, first, both = append(names, s.Counts.Catalog), append(first, s.Counts.Catalog+1), append(both, s.Counts.Catalog+2)
	}
	const key = "/aether/v1/regions/other/clusters/other/ns/%s/services/%s/protocols/%s/endpoints/%s" // contract 9.5
	row := func(ip string) []byte {
		b, err := proto.Marshal(storetest.HTTP(ip, "far"))
		w.must(err)
		return b
	}
	good := func(service string) string { return fmt.Sprintf(key, "shop", service, "PROTOCOL_HTTP", "10.7.1.1") }
	put := func(i int, out bool) error {
		ip := fmt.Sprintf("10.8.%d.%d", i/250, 1+i%250)
		k, v := fmt.Sprintf(key, "shop", "cart", "PROTOCOL_HTTP", ip), row(ip)
		switch i % 5 {
		case 0: // garbage under a good key
			v = []byte("\xff\xff\xffno row")
		case 1: // another address than the key's
			v = row("10.9.9.9")
		case 2: // a class that there is not
			k = fmt.Sprintf(key, "shop", "cart", "PROTOCOL_SMOKE", ip)
		case 3: // no address
			k = fmt.Sprintf(key, "shop", "cart", "PROTOCOL_HTTP", ip+".7")
		default: // of another layout
			k = fmt.Sprintf("/aether/v1/regions/other/clusters/other/ns/shop/services/cart/endpoints/%s", ip)
		}
		if out {
			v = nil
		}
		return w.PutKey(w.ctx, k, v)
	}
	all := func(out bool) {
		errs := make([]error, writers)
		var wg sync.WaitGroup
		for n := range writers {
			wg.Go(func() {
				for i := n; i < bad && errs[n] == nil; i += writers {
					errs[n] = put(i, out)
				}
			})
		}
		wg.Wait()
		for _, err := range errs {
			w.must(err)
		}
	}
	l := w.begin()
	l.more(rps)
	w.must(put(0, false))
	w.must(w.PutKey(w.ctx, good("stock"), row("10.7.1.1")))
	all(false)
	w.awaitCatalog(first)
	w.must(w.PutKey(w.ctx, good("till"), row("10.7.1.1")))
	w.awaitCatalog(both)
	w.step()
	w.Registrar().Kill() // and among what is listed at a start
	w.awaitConnected(false)
	w.must(w.StartRegistrar())
	w.must(w.AwaitRegistrar(w.ctx))
	w.awaitConnected(true)
	w.awaitCatalog(both)
	l.more(rps)
	w.step()
	all(true)
	for _, service := range []string{"stock", "till"} {
		w.must(w.PutKey(w.ctx, good(service), nil))
	}
	w.awaitCatalog(names)
	l.check("bad rows")
}

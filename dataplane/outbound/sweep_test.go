package outbound

import (
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"aether/controlplane/compile"
	"aether/dataplane/model"
	"aether/dataplane/model/modeltest"
	"aether/e2e/testseed"
)

// TestDeparted: what is judged by the difference of two snapshots is judged as by the whole of
// the newer one: whatever was there before and is not, or is unhealthy, is closed, and nothing
// else, also where a port changes its class or an address its service.
func TestDeparted(t *testing.T) {
	r := testseed.Rand(t)
	judged := map[error]int{}
	for range 300 {
		m := modeltest.LivelyMesh(r)
		x := compile.NewIndex(m)
		before, _ := x.Update()
		rows := map[model.ServiceName][]model.Endpoint{}
		for _, e := range m.Endpoints {
			rows[e.Service] = append(rows[e.Service], e)
		}
		for range 1 + r.IntN(3) {
			next := modeltest.LivelyMesh(r)
			for _, n := range slices.SortedFunc(maps.Keys(rows), func(a, b model.ServiceName) int { return strings.Compare(a.String(), b.String()) }) {
				list := rows[n]
				switch r.IntN(6) {
				case 0: // others
					list = nil
					for _, e := range next.Endpoints {
						if e.Service == n {
							list = append(list, e)
						}
					}
				case 1: // another state, identity or class
					list = append([]model.Endpoint(nil), list...)
					for i := range list {
						switch r.IntN(4) {
						case 0:
							list[i].Health = model.Health(r.IntN(4))
						case 1:
							list[i].SPIFFEID = "spiffe://td/other"
						case 2:
							list[i].Ports = []model.Port{{Number: 8080, Class: model.TCP}, {Number: 9000, Class: model.TCP}}
						}
					}
				case 2: // another service has them
					other := model.ServiceName{Namespace: "shop", Name: "cart"}
					moved := append([]model.Endpoint(nil), list...)
					for i := range moved {
						moved[i].Service = other
					}
					x.SetEndpoints(n, nil)
					x.SetEndpoints(other, moved)
					continue
				default:
					continue
				}
				x.SetEndpoints(n, list)
			}
		}
		now, _ := x.Update()
		d := removedEndpoints(before, now)
		there := map[endpointID]struct{ well, sick bool }{} // by its rows, which may be of several services
		for _, b := range now.Backends() {
			for _, e := range now.Endpoints(b).All() {
				p := endpointID{e.Addr, b.Port, e.SPIFFEID}
				is := there[p]
				is.well, is.sick = is.well || e.Health != model.Unhealthy, is.sick || e.Health == model.Unhealthy
				there[p] = is
			}
		}
		for _, b := range before.Backends() {
			for _, e := range before.Endpoints(b).All() {
				var want error
				switch is, ok := there[endpointID{e.Addr, b.Port, e.SPIFFEID}]; {
				case !ok:
					want = errEndpointGone
				case is.sick && is.well:
					continue // two services have it, and do not agree: closed or not, neither is wrong
				case is.sick && e.Health != model.Unhealthy:
					want = errEndpointUnhealthy
				case is.sick:
					continue // it was closed before, or not: all the same
				}
				if got := d.causeOf(hopKey{addr: e.Addr, port: b.Port, pin: e.SPIFFEID}); got != want {
					t.Fatalf("%s %+v: %v, want %v", b.Name, e, got, want)
				}
				judged[want]++
			}
		}
	}
	if judged[nil] == 0 || judged[errEndpointGone] == 0 || judged[errEndpointUnhealthy] == 0 {
		t.Errorf("%v", judged)
	}
}

// BenchmarkDeparted is what one endpoint's change costs among 20,000 (issue 6: no look at all of them).
func BenchmarkDeparted(b *testing.B) {
	m := modeltest.Mesh(b, "pods shop/cart 8080")
	for i := range 2000 {
		n := model.ServiceName{Namespace: "big", Name: "s" + string(rune('a'+i%26)) + string(rune('a'+i/26%26)) + string(rune('a'+i/676))}
		for k := range 10 {
			e := m.Endpoints[0]
			e.Service, e.Pod = n, n.Name
			e.IP = modelAddr(i, k)
			e.Ports = []model.Port{{Number: 8080, Class: model.HTTP}, {Number: 9000, Class: model.TCP}, {Number: 9090, Class: model.HTTP}}
			m.Endpoints = append(m.Endpoints, e)
		}
	}
	x := compile.NewIndex(m)
	before, _ := x.Update()
	row := m.Endpoints[0]
	for _, c := range []struct {
		name string
		rows []model.Endpoint
	}{{"changed", []model.Endpoint{func() model.Endpoint { e := row; e.Health = model.Draining; return e }()}}, {"gone", nil}} {
		x.SetEndpoints(row.Service, c.rows)
		now, _ := x.Update()
		b.Run(c.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				sweptSink = removedEndpoints(before, now)
			}
		})
		x.SetEndpoints(row.Service, []model.Endpoint{row})
		before, _ = x.Update()
	}
}

var sweptSink endpointChanges

func modelAddr(i, k int) netip.Addr {
	return netip.AddrFrom4([4]byte{10, byte(k), byte(i >> 8), byte(i)})
}

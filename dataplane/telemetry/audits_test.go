package telemetry

import (
	"fmt"
	"sync"
	"testing"
)

// TestAudits: loops count beside each other and a scrape adds them up; filters beyond the bound are counted as one, and
// nothing is lost; what is counted again allocates nothing.
func TestAudits(t *testing.T) {
	var a Audits
	var wg sync.WaitGroup
	const loops, each, filters = 4, 50, maxAudited + 10
	for range loops {
		wg.Go(func() {
			s := a.Shard()
			for f := range filters {
				for i := range each {
					s.Count(fmt.Sprint("HTTPFilter shop/f", f), i < 20)
				}
			}
		})
	}
	wg.Wait()
	m := New(Config{})
	m.Audits(&a, "inbound")
	got := map[[2]string]float64{}
	families, err := m.reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() != "aether_audit_requests_total" {
			continue
		}
		for _, x := range f.GetMetric() {
			var k [2]string
			for _, l := range x.GetLabel() {
				switch l.GetName() {
				case "filter":
					k[0] = l.GetValue()
				case "result":
					k[1] = l.GetValue()
				}
			}
			got[k] = x.GetCounter().GetValue()
		}
	}
	sum := map[string]float64{}
	for k, n := range got {
		sum[k[1]] += n
		if k[0] != overflow && (k[1] == "denied" && n > loops*20 || k[1] == "allowed" && n > loops*30) {
			t.Errorf("%v: %v", k, n)
		}
	}
	if len(got) > 2*(maxAudited+1) || sum["denied"] != loops*filters*20 || sum["allowed"] != loops*filters*30 {
		t.Errorf("%d series, %v", len(got), sum)
	}
	s := a.Shard()
	s.Count("HTTPFilter shop/f1", true)
	if n := testing.AllocsPerRun(100, func() { s.Count("HTTPFilter shop/f1", false) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

package dataplane_test

import (
	"sync/atomic"
	"testing"
)

// inProcess makes towns whose pods meet in process. Of the test's goroutine.
var inProcess bool

// neighbours counts how often a pod was met in process.
var neighbours atomic.Int64

// TestInProcess: what features promise, they promise in process, too: the very same tests.
// Left out are those that are about the wire between two nodes.
func TestInProcess(t *testing.T) {
	inProcess = true
	defer func() { inProcess = false }()
	for _, tt := range []struct {
		name string
		test func(*testing.T)
	}{
		{"Rules", TestRules},
		{"TCPRules", TestTCPRules}, // over the hop, whatever is said
		{"UpgradeRules", TestUpgradeRules},
		{"Retries", TestRetries},
		{"GRPCStatus", TestGRPCStatus},
		{"RetriesAreBounded", TestRetriesAreBounded},
		{"ClientLeavesMeanwhile", TestClientLeavesMeanwhile},
		{"EjectedByErrors", TestEjectedByErrors},
		{"OwnFaultEjectsNobody", TestOwnFaultEjectsNobody},
		{"EndpointLeaves", TestEndpointLeaves},
		{"Cuts", TestCuts},
		{"Mirror", TestMirror},
		{"MirrorHangs", TestMirrorHangs},
		{"MirrorSlow", TestMirrorSlow},
		{"MirrorIsCut", TestMirrorIsCut},
		{"MirrorShare", TestMirrorShare},
		{"SessionPersistence", TestSessionPersistence},
		{"Authz", TestAuthz},
		{"AuthzOutage", TestAuthzOutage},
		{"AuthzTimeout", TestAuthzTimeout},
	} {
		t.Run(tt.name, func(t *testing.T) {
			before := neighbours.Load()
			t.Cleanup(func() { // behind its parallel parts
				if met := neighbours.Load() > before; met == (tt.name == "TCPRules") {
					t.Errorf("pods met in process: %v", met)
				}
			})
			tt.test(t)
		})
	}
}

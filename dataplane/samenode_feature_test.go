package dataplane_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
)

// inProcess makes towns whose pods meet in process. Of the test's goroutine.
var inProcess bool

// neighbours counts how often a pod was met in process.
var neighbours atomic.Int64

// TestInProcess: every feature test of this package holds in process, too. Left out, each with its reason, are those
// that are about the wire between two nodes. A feature test that is not listed fails this test.
func TestInProcess(t *testing.T) {
	inProcess = true
	defer func() { inProcess = false }()
	type entry struct {
		test    func(*testing.T)
		without string // the reason why no pod is met in process; "": at least one has to be
		wire    string // the reason why the test is left out
	}
	table := map[string]entry{
		"TestRules":                        {test: TestRules},
		"TestAuditIsTold":                  {test: TestAuditIsTold},
		"TestTCPRules":                     {test: TestTCPRules, without: "raw TCP stays on the hop (decision 018)"},
		"TestUpgradeRules":                 {test: TestUpgradeRules},
		"TestRetries":                      {test: TestRetries},
		"TestGRPCStatus":                   {test: TestGRPCStatus},
		"TestRetriesAreBounded":            {test: TestRetriesAreBounded},
		"TestClientLeavesMeanwhile":        {test: TestClientLeavesMeanwhile},
		"TestEjectedByErrors":              {test: TestEjectedByErrors},
		"TestOwnFaultEjectsNobody":         {test: TestOwnFaultEjectsNobody},
		"TestEndpointLeaves":               {test: TestEndpointLeaves},
		"TestCuts":                         {test: TestCuts},
		"TestMirror":                       {test: TestMirror},
		"TestMirrorHangs":                  {test: TestMirrorHangs},
		"TestMirrorSlow":                   {test: TestMirrorSlow},
		"TestMirrorIsCut":                  {test: TestMirrorIsCut},
		"TestMirrorShare":                  {test: TestMirrorShare},
		"TestSessionPersistence":           {test: TestSessionPersistence},
		"TestAuthz":                        {test: TestAuthz},
		"TestAuthzOutage":                  {test: TestAuthzOutage},
		"TestWhatOnlyProxiesMaySet":        {test: TestWhatOnlyProxiesMaySet},
		"TestDeadlineThatNobodyKeeps":      {test: TestDeadlineThatNobodyKeeps},
		"TestAuthzTimeout":                 {test: TestAuthzTimeout},
		"TestAuthzClientLeaves":            {test: TestAuthzClientLeaves, without: "the client leaves before an endpoint is chosen"},
		"TestEjectedByConnects":            {wire: "is about dials that fail"},
		"TestAddressReused":                {wire: "is about an address that another pod answers at"},
		"TestEndpointLeavesWhileDialled":   {wire: "is about a dial that hangs"},
		"TestRawBalance":                   {test: TestRawBalance, without: "raw TCP stays on the hop (decision 018)"},
		"TestRawEjected":                   {test: TestRawEjected, without: "raw TCP stays on the hop (decision 018)"},
		"TestColdDial":                     {test: TestColdDial},
		"TestColdDialExpires":              {test: TestColdDialExpires, without: "no rows come"},
		"TestColdDialOverflow":             {test: TestColdDialOverflow, without: "no rows come"},
		"TestColdMirror":                   {test: TestColdMirror},
		"TestCold":                         {test: TestCold},
		"TestColdExpires":                  {test: TestColdExpires, without: "no rows come"},
		"TestColdNoMore":                   {test: TestColdNoMore, without: "no rows come"},
		"TestColdClientLeaves":             {test: TestColdClientLeaves},
		"TestColdRaw":                      {test: TestColdRaw, without: "raw TCP stays on the hop (decision 018)"},
		"TestColdUnknown":                  {test: TestColdUnknown, without: "the name is nobody's"},
		"TestGoneBeforeAccept":             {test: TestGoneBeforeAccept, without: "the client has gone before its connection is accepted"},
		"TestGRPCLocalAnswers":             {test: TestGRPCLocalAnswers},
		"TestGRPCDeadline":                 {test: TestGRPCDeadline},
		"TestGRPCBig":                      {test: TestGRPCBig},
		"TestGRPCHealth":                   {test: TestGRPCHealth},
		"TestGRPCConnectionAge":            {test: TestGRPCConnectionAge},
		"TestGRPCManyStreams":              {test: TestGRPCManyStreams},
		"TestGRPCInterim":                  {test: TestGRPCInterim},
		"TestEarlyAnswerThenReset":         {test: TestEarlyAnswerThenReset},
		"TestClientGoesInAnUpload":         {test: TestClientGoesInAnUpload},
		"TestCloseOverHTTP2":               {test: TestCloseOverHTTP2},
		"TestBothProtocolsAtOnePort":       {test: TestBothProtocolsAtOnePort},
		"TestGRPCHour":                     {test: TestGRPCHour},
		"TestGRPCKeepalive":                {test: TestGRPCKeepalive},
		"TestTimeoutsBesideALongRequest":   {test: TestTimeoutsBesideALongRequest},
		"TestSlowFirstLine":                {test: TestSlowFirstLine, without: "no head is whole"},
		"TestRetryInNewWorld":              {test: TestRetryInNewWorld},
		"TestTimeoutsAreFailures":          {test: TestTimeoutsAreFailures},
		"TestRetriesOfOnePod":              {test: TestRetriesOfOnePod},
		"TestGRPCRefusalsAreRecorded":      {test: TestGRPCRefusalsAreRecorded},
		"TestSameNodeAlike":                {wire: "compares both ways itself"},
		"TestSameNodeIdentity":             {wire: "compares both ways itself"},
		"TestInProcess":                    {wire: "is this one"},
		"TestSessionsEndWithTheirIdentity": {wire: "compares both ways itself"},
		"TestSessionOutlivesCertificates":  {wire: "compares both ways itself"},
		"TestRenewalReachesNobody":         {wire: "is about a handshake"},
		"TestRotationLosesNothing":         {wire: "compares both ways itself"},
		"TestPeerThatStays":                {wire: "is about a peer of a hop"},
		"TestSilentCallers":                {wire: "is about the mesh port"},
		"TestCrowdOfHellos":                {wire: "is about the mesh port"},
		"TestSilentConnectionsOfAnAddress": {wire: "is about the mesh port"},
		"TestHelloInPieces":                {wire: "is about the mesh port"},
		"TestServerNamesOfOwnPorts":        {wire: "is about the mesh port"},
	}
	for _, name := range featureTests(t) {
		tt, ok := table[name]
		if !ok {
			t.Errorf("%s is a feature test that is not listed here: list it, or the reason why it is left out", name)
			continue
		}
		delete(table, name)
		if tt.wire != "" {
			continue
		}
		t.Run(strings.TrimPrefix(name, "Test"), func(t *testing.T) {
			before := neighbours.Load()
			t.Cleanup(func() { // behind its parallel parts
				if met := neighbours.Load() > before; met == (tt.without != "") {
					t.Errorf("pods met in process: %v (%s)", met, tt.without)
				}
			})
			tt.test(t)
		})
	}
	for name := range table {
		t.Errorf("%s is listed and is no feature test", name)
	}
}

// featureTests are the names of the tests in this package's *_feature_test.go, in the order of files and lines.
func featureTests(t *testing.T) (names []string) {
	t.Helper()
	files, err := filepath.Glob("*_feature_test.go")
	if err != nil || len(files) == 0 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	for _, name := range files {
		f, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range f.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && fn.Recv == nil && strings.HasPrefix(fn.Name.Name, "Test") {
				names = append(names, fn.Name.Name)
			}
		}
	}
	return names
}
